"""`EngineArgs`: the single definition of every engine option.

The keyword arguments of `LLM`, `AsyncLLM` and `LLMEngine` and the command-line flags are all derived from the fields
below. Options shared with vLLM have vLLM's names. Values are checked on their own here; checks that need the checkpoint
are in `resolve`, those that need the device are in the worker.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self, TypeVar

from octavo.config.engine import (
    CacheConfig,
    EngineConfig,
    KVCacheDType,
    LoadConfig,
    LoadFormat,
    LoraConfig,
    SchedulerConfig,
    SupervisionConfig,
)
from octavo.config.hf import read_model_config
from octavo.config.hf_quantization import resolve_quantization
from octavo.config.hub import resolve_model
from octavo.config.model import DType, ModelConfig, PoolerName, QuantizationName
from octavo.config.option_types import AMOUNT, COUNT, FRACTION, POSITIVE, Limit, check_options, option
from octavo.config.parallel import ExecutorBackend, ParallelConfig
from octavo.config.speculative import SpeculativeConfig, resolve_speculation
from octavo.errors import InvalidParameterError, UnknownOptionError

DEFAULT_MODEL = "demo"
_SEED: Limit = ("between 0 and 2^64 - 1", lambda value: 0 <= value < 2**64)
_LORA_SIZES = ("max_loras", "max_lora_rank", "max_cpu_loras")
Settings = TypeVar("Settings", ParallelConfig, CacheConfig, LoadConfig, SupervisionConfig, EngineConfig)


def for_streaming(options: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the defaults of a streaming engine for options that are not set."""
    defaults: dict[str, Any] = {"step_target_s": 0.25, "spare_process": True}
    if options.get("enable_prefix_caching") is not False:
        defaults["prefix_cache_disk"] = 2.0
    return {**options, **{name: value for name, value in defaults.items() if options.get(name) is None}}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineArgs:
    """All engine options. Raises InvalidParameterError: names the option, its value and the limit."""

    model_name: str = option(
        DEFAULT_MODEL,
        "checkpoint folder, GGUF file, Hub id (org/name, or org/name:Q4_K_M for one of several GGUF files), `smollm2`, "
        "`demo`, the bundled model, or `demo-vl`, the bundled vision-language model",
    )
    tokenizer: str | None = option(None, "folder or Hub id of the tokenizer; default: the model's own")
    chat_template: str | None = option(None, "Jinja file to use instead of the model's chat template")
    revision: str | None = option(None, "branch, tag or commit of a Hub model")
    dtype: Literal["auto", DType] = option(
        "auto",
        "dtype of weights and activations; auto: the checkpoint's, or bfloat16 on CPUs without kernels for float16",
    )
    model_impl: Literal["auto", "octavo", "transformers"] = option(
        "auto",
        "whose code computes the model: auto takes that of the installed transformers for models or settings that "
        "Octavo does not know; it is slower, and the same bytes in any batch are not promised",
    )
    pooler: PoolerName = option(
        "auto",
        "how vectors are made of a prompt: last, mean or cls (the first token's); rerank: pairs of texts are scored by "
        "the probability of yes as the next token, as Qwen3-Reranker does; auto: as the checkpoint's files say it",
    )
    quantization: QuantizationName | None = option(
        None,
        "quantize the weights of linear layers at load time: int8 or int4 (GPU, or CPU except with float32), "
        "or fp8 (GPU). GGUF files with quantized tensors: gguf computes with these as they are (the default on a CPU "
        "except with float32), dequantize converts them to floats at load",
    )
    device: Literal["auto", "cpu", "cuda", "mps", "xpu"] = option(
        "auto", "auto: the first available of cuda, xpu, mps, cpu"
    )
    max_model_len: int | None = option(
        None, "maximum tokens of a request, prompt plus output; default: the model's", COUNT
    )
    max_num_seqs: int = option(256, "maximum number of running requests, capped at max_num_batched_tokens", COUNT)
    max_num_batched_tokens: int = option(2048, "maximum tokens per step; longer prompts are prefilled in chunks", COUNT)
    step_target_s: float | None = option(
        None,
        "target duration of a step in seconds: prompts are prefilled in chunks that fit it, or twice that long "
        "if many streams leave no room; 0: chunks as long as possible; "
        "default: 0.25 for async programs and the server, 0 for offline batches",
        AMOUNT,
    )
    block_size: int = option(32, "tokens per KV block", COUNT)
    kv_cache_dtype: KVCacheDType = option(
        "auto", "dtype of the KV cache: auto (the model's dtype), bf16, int8 (CPU), fp8 (GPU)"
    )
    num_kv_blocks: int | None = option(None, "KV blocks of each KV group; default: as many as fit into memory", COUNT)
    gpu_memory_utilization: float | None = option(
        None, "fraction of the device's memory to use, on any device; default: 0.9, on CPUs 0.5", FRACTION
    )
    encoder_cache_tokens: int | None = option(
        None, "maximum tokens of images whose embeddings are kept, at least the largest image's; default: 16384", COUNT
    )
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of common prompt prefixes")
    prefix_cache_disk: float | None = option(
        None,
        "maximum GiB of prompt prefixes to keep in ~/.cache/octavo (or $OCTAVO_CACHE), to be found after a restart; "
        "0: none; default: 2 for async programs and the server, 0 for offline batches",
        AMOUNT,
    )
    generation_config: Literal["auto", "none"] = option("auto", "auto: take sampling defaults from the checkpoint")
    load_format: LoadFormat = option("auto", "format of the weights; auto: detect it; dummy: random weights")
    tensorizer_uri: str | None = option(
        None, "file or http(s) address of the model's weights in the tensorizer format; default: in the model's folder"
    )
    packed_cache_gib: float = option(
        20.0,
        "maximum GiB of packed weights to cache in ~/.cache/octavo (or $OCTAVO_CACHE) for the next start; 0: none",
        AMOUNT,
    )
    seed: int | None = option(
        None, "base of the seeds of requests without one, and of dummy weights; default: random", _SEED
    )
    priority_ageing_s: float = option(30.0, "seconds of waiting that raise a request by one priority class", POSITIVE)
    threads: int | None = option(None, "CPU threads of the model; default: all cores available to this process", COUNT)
    enforce_eager: bool = option(False, "run op by op, without captured graphs")
    deterministic: bool = option(
        False, "use only batch-invariant kernels, or fail; the C++ kernels for CPUs always are"
    )
    speculative_config: str | dict[str, Any] | None = option(
        None,
        'speculative decoding, a JSON object: {"method": "ngram"} verifies drafts copied from the prompt and output, '
        '{"model": "folder, GGUF file or Hub id"} those of a smaller model, '
        '{"method": "eagle3", "model": "folder or Hub id"} those of an EAGLE-3 head, {"method": "mtp"} those of the '
        "model's own MTP head, which is the default where its files have one; "
        '{"method": "none"}: no drafts; more keys in docs/speculative.md',
    )
    enable_lora: bool = option(False, "serve LoRA adapters: requests may name one with lora_request; see docs/lora.md")
    max_loras: int | None = option(
        None, "different adapters in one step; each takes device memory for max_lora_rank; default: 4", COUNT
    )
    max_lora_rank: int | None = option(None, "largest rank of an adapter; default: 16", COUNT)
    max_cpu_loras: int | None = option(
        None, "adapters kept in host memory, at least max_loras; default: four times max_loras", COUNT
    )
    lora_experts: bool = option(
        False, "also serve adapters of MoE experts: every expert gets slots, which takes a lot of memory"
    )
    tensor_parallel_size: int = option(1, "ranks that each layer is sharded over", COUNT)
    pipeline_parallel_size: int = option(1, "pipeline stages, each with its own layers and ranks", COUNT)
    data_parallel_size: int = option(1, "replicas of the model that share one frontend", COUNT)
    enable_expert_parallel: bool = option(
        False, "distribute whole experts over the tensor-parallel ranks instead of sharding each"
    )
    distributed_executor_backend: ExecutorBackend | None = option(
        None, "how ranks are run: uniproc, mp (local processes) or ray; default: uniproc for one rank, mp for several"
    )
    step_timeout_s: float = option(
        300.0,
        "maximum duration of a step on ranks in other processes; then they are considered stuck and killed",
        POSITIVE,
    )
    engine_process: bool | None = option(
        None, "run the engine core in a separate process; default: yes for async programs, no for offline batches"
    )
    max_restarts: int = option(
        16,
        "starts in a row of an engine process that dies before it computes anything; then the engine ends. Requests in "
        "flight go on in the next process, with the same bytes; 0: they end with the first one",
        AMOUNT,
    )
    stall_timeout_s: float = option(
        300.0, "seconds without a step after which an engine process that has requests is replaced; 0: never", AMOUNT
    )
    hot_standby: bool = option(
        False, "keep a loaded engine process that takes over at once when another one dies: needs its memory twice"
    )
    spare_process: bool | None = option(
        None,
        "keep a process that has done its imports, so that a new engine process starts faster, for about 200 MB; "
        "default: true for async programs and the server; no effect where ranks are processes",
    )
    stats_interval_s: float = option(10.0, "seconds between log lines with engine statistics; 0: none", AMOUNT)
    trust_remote_code: bool = option(False, "not supported: Octavo never runs code from a checkpoint")

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_model_len == 1:
            raise InvalidParameterError("max_model_len", 1, "at least 2: one token of prompt and one of output")
        if self.trust_remote_code:
            limit = "not supported: Octavo never runs code from a checkpoint"
            raise InvalidParameterError("trust_remote_code", True, limit)
        if self.tensorizer_uri is not None and self.load_format not in ("auto", "tensorizer"):
            limit = f"unset: it has no effect with load_format={self.load_format!r}"
            raise InvalidParameterError("tensorizer_uri", self.tensorizer_uri, limit)
        if self.speculative_config is not None:
            SpeculativeConfig.parse(self.speculative_config)
        if self.prefix_cache_disk and not self.enable_prefix_caching:
            limit = "0 or unset: it has no effect without enable_prefix_caching"
            raise InvalidParameterError("prefix_cache_disk", self.prefix_cache_disk, limit)
        self._lora()
        if self.engine_process is False and self.data_parallel_size > 1:
            limit = f"true or unset: each of {self.data_parallel_size} replicas (data_parallel_size) is a process"
            raise InvalidParameterError("engine_process", False, limit)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Build from keyword options; for an unknown name, the error suggests the closest known one."""
        known = [spec.name for spec in fields(cls)]
        for name in options:
            if name not in known:
                raise UnknownOptionError("engine option", name, known)
        return cls(**options)

    def resolve(self) -> EngineConfig:
        """Locate the model, read its configuration and resolve every option that does not need the device.

        Raises ModelNotFoundError, CheckpointError, UnsupportedModelError: about the model. InvalidParameterError: an
        option that does not fit this model.
        """
        with_weights = self.load_format != "dummy"
        path = resolve_model(self.model_name, self.revision, with_weights=with_weights)
        tokenizer_path = resolve_model(self.tokenizer, with_weights=False) if self.tokenizer else path
        model = read_model_config(
            path,
            model=self.model_name,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            model_impl=self.model_impl,
            pooler=self.pooler,
        )
        parallel = self._same_named(ParallelConfig)
        parallel.check_fits(model)
        if model.encoder is not None:
            self._check_encoder()
        scheduler = self._scheduler(model)
        quantization, model = resolve_quantization(self.quantization, model, path)
        speculative, draft_model = resolve_speculation(
            self.speculative_config, model, parallel, quantization, with_weights=with_weights
        )
        load = self._same_named(LoadConfig, seed=self.seed or 0, packed_cache_bytes=int(self.packed_cache_gib * 2**30))
        return self._same_named(
            EngineConfig,
            model=model,
            cache=self._cache(model),
            scheduler=scheduler,
            load=load,
            quantization=quantization,
            is_dtype_auto=self.dtype == "auto",
            speculative=speculative,
            draft_model=draft_model,
            lora=self._lora(),
            parallel=parallel,
            supervision=replace(self._same_named(SupervisionConfig), spare_process=bool(self.spare_process)),
            tokenizer_path=str(tokenizer_path),
            use_generation_config=self.generation_config == "auto",
        )

    def _same_named(self, settings: type[Settings], **others: Any) -> Settings:
        """Make a dataclass of settings from the options that its fields are named after, and from others."""
        known = {spec.name for spec in fields(self)}
        taken = {spec.name: getattr(self, spec.name) for spec in fields(settings) if spec.name in known}
        return settings(**{**taken, **others})

    def _scheduler(self, model: ModelConfig) -> SchedulerConfig:
        cache_tokens = whole_span = 0
        if model.vision is not None:
            model.vision.check_fits(model.path, model.vocab_size, self.tensor_parallel_size)
            cache_tokens = self.encoder_cache_tokens or min(16384, model.max_model_len)  # Qwen2-VL's largest image
            whole_span = model.vision.largest_whole_span(self.max_num_seqs, self.max_num_batched_tokens)
        num_tokens = self.max_num_batched_tokens
        if model.encoder is not None:  # which computes each prompt in one step
            whole_span = model.max_model_len - 1
            num_tokens = max(num_tokens, whole_span)
        return SchedulerConfig(
            max_num_seqs=min(self.max_num_seqs, num_tokens),  # every running request gets a token
            max_num_batched_tokens=num_tokens,
            ageing_s=self.priority_ageing_s,
            encoder_cache_tokens=cache_tokens,
            largest_whole_span=whole_span,
            step_target_s=self.step_target_s or 0.0,
        )

    def _check_encoder(self) -> None:
        """Refuse what an encoder cannot do. Raises InvalidParameterError."""
        for name in ("speculative_config", "enable_lora"):
            if value := getattr(self, name):
                raise InvalidParameterError(name, value, "unset: it has no effect on an encoder, which writes no text")
        if self.pipeline_parallel_size > 1:
            raise InvalidParameterError("pipeline_parallel_size", self.pipeline_parallel_size, "1, of an encoder")

    def _cache(self, model: ModelConfig) -> CacheConfig:
        if model.encoder is not None:  # what a token is computed to depends on those behind it
            return self._same_named(CacheConfig, enable_prefix_caching=False)
        return self._same_named(CacheConfig, prefix_disk_bytes=self._prefix_disk_bytes())

    def _prefix_disk_bytes(self) -> int:
        """Return each replica's share."""
        return int((self.prefix_cache_disk or 0.0) * 2**30) // self.data_parallel_size

    def _lora(self) -> LoraConfig | None:
        sizes = {name: value for name in _LORA_SIZES if (value := getattr(self, name)) is not None}
        if self.enable_lora:
            host_copies = 4 * sizes.get("max_loras", 4)
            return LoraConfig(**{"max_cpu_loras": host_copies, **sizes}, experts=self.lora_experts)
        if self.lora_experts:
            raise InvalidParameterError("lora_experts", True, "false: it has no effect without enable_lora")
        for name, value in sizes.items():
            raise InvalidParameterError(name, value, "unset: it has no effect without enable_lora")
        return None
