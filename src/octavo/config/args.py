"""`EngineArgs`: the single definition of every engine option.

The keyword arguments of `LLM`, `AsyncLLM` and `LLMEngine` and the command-line flags are all derived from the fields
below. Options shared with vLLM have vLLM's names. Values are checked on their own here; checks that need the checkpoint
are in `resolve`, those that need the device are in the worker.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from octavo.config.drafting import resolve_drafting
from octavo.config.engine import (
    CacheConfig,
    EngineConfig,
    KVCacheDType,
    LoadConfig,
    LoadFormat,
    SchedulerConfig,
)
from octavo.config.hf import read_model_config
from octavo.config.hf_quantization import resolve_quantization
from octavo.config.hub import resolve_model
from octavo.config.lora import LoraConfig
from octavo.config.model import DType, ModelConfig, QuantizationName
from octavo.config.option_types import check_type, option
from octavo.config.parallel import ExecutorBackend, ParallelConfig
from octavo.config.parallel_limits import check_parallel
from octavo.config.speculative import SpeculativeConfig
from octavo.config.vision_limits import check_vision, largest_whole_span
from octavo.errors import InvalidParameterError, UnknownOptionError

DEFAULT_MODEL = "demo"
STREAMING_STEP_TARGET_S = 0.25  # default of `step_target_s` when responses are streamed
_ENCODER_CACHE_TOKENS = 16384  # the largest image of Qwen2-VL
_DEGREES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_LORA_SIZES = ("max_loras", "max_lora_rank", "max_cpu_loras")
_COUNTS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "max_model_len",
    "num_kv_blocks",
    "encoder_cache_tokens",
    "threads",
    *_LORA_SIZES,
    *_DEGREES,
)


def for_streaming(options: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the defaults of a streaming engine for options that are not set."""
    target_s = options.get("step_target_s")
    return {**options, "step_target_s": STREAMING_STEP_TARGET_S if target_s is None else target_s}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineArgs:
    """All engine options.

    Raises:
        InvalidParameterError: names the option, its value and the limit.
    """

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
        "dtype of weights and activations; auto: the checkpoint's, but on CPUs without float16 kernels bfloat16",
    )
    quantization: QuantizationName | None = option(
        None,
        "quantize the weights of linear layers at load time: int8 or int4 (GPU, or CPU with bfloat16 activations), "
        "or fp8 (GPU). GGUF files with quantized tensors: gguf computes with these as they are (the default on a CPU "
        "with bfloat16), dequantize converts them to floats at load",
    )
    device: Literal["auto", "cpu", "cuda", "mps", "xpu"] = option(
        "auto", "auto: the first available of cuda, xpu, mps, cpu"
    )
    max_model_len: int | None = option(None, "maximum tokens of a request, prompt plus output; default: the model's")
    max_num_seqs: int = option(256, "maximum number of running requests, capped at max_num_batched_tokens")
    max_num_batched_tokens: int = option(2048, "maximum tokens per step; longer prompts are prefilled in chunks")
    step_target_s: float | None = option(
        None,
        "target duration of a step in seconds: prompts are prefilled in chunks that fit it, or twice that long "
        "if many streams leave no room; 0: chunks as long as possible; "
        "default: 0.25 for async programs and the server, 0 for offline batches",
    )
    block_size: int = option(32, "tokens per KV block")
    kv_cache_dtype: KVCacheDType = option(
        "auto", "dtype of the KV cache: auto (the model's dtype), bf16, int8 (CPU), fp8 (GPU)"
    )
    num_kv_blocks: int | None = option(None, "KV blocks of each KV group; default: as many as fit into memory")
    gpu_memory_utilization: float | None = option(
        None, "fraction of the device's memory to use, on any device; default: 0.9, on CPUs 0.5"
    )
    encoder_cache_tokens: int | None = option(
        None, "maximum tokens of images whose embeddings are kept, at least the largest image's; default: 16384"
    )
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of common prompt prefixes")
    generation_config: Literal["auto", "none"] = option("auto", "auto: take sampling defaults from the checkpoint")
    load_format: LoadFormat = option("auto", "format of the weights; auto: detect it; dummy: random weights")
    tensorizer_uri: str | None = option(
        None, "file or http(s) address of the model's weights in the tensorizer format; default: in the model's folder"
    )
    packed_cache_gib: float = option(
        20.0, "maximum GiB of packed weights to cache in ~/.cache/octavo (or $OCTAVO_CACHE) for the next start; 0: none"
    )
    seed: int | None = option(None, "base of the seeds of requests without one, and of dummy weights; default: random")
    priority_ageing_s: float = option(30.0, "seconds of waiting that raise a request by one priority class")
    threads: int | None = option(None, "CPU threads of the model; default: all cores available to this process")
    enforce_eager: bool = option(False, "run op by op, without captured graphs")
    deterministic: bool = option(
        False, "use only batch-invariant kernels, or fail; the C++ kernels for CPUs always are"
    )
    speculative_config: str | dict[str, Any] | None = option(
        None,
        'speculative decoding, a JSON object: {"method": "ngram"} verifies drafts copied from the prompt and output, '
        '{"model": "folder, GGUF file or Hub id"} those of a smaller model, '
        '{"method": "eagle3", "model": "folder or Hub id"} those of an EAGLE-3 head; more keys in docs/speculative.md',
    )
    enable_lora: bool = option(False, "serve LoRA adapters: requests may name one with lora_request; see docs/lora.md")
    max_loras: int | None = option(
        None, "different adapters in one step; each takes device memory for max_lora_rank; default: 4"
    )
    max_lora_rank: int | None = option(None, "largest rank of an adapter; default: 16")
    max_cpu_loras: int | None = option(
        None, "adapters kept in host memory, at least max_loras; default: four times max_loras"
    )
    lora_experts: bool = option(
        False, "also serve adapters of MoE experts: every expert gets slots, which takes a lot of memory"
    )
    tensor_parallel_size: int = option(1, "ranks that each layer is sharded over")
    pipeline_parallel_size: int = option(1, "pipeline stages, each with its own layers and ranks")
    data_parallel_size: int = option(1, "replicas of the model that share one frontend")
    enable_expert_parallel: bool = option(
        False, "distribute whole experts over the tensor-parallel ranks instead of sharding each"
    )
    distributed_executor_backend: ExecutorBackend | None = option(
        None, "how ranks are run: uniproc, mp (local processes) or ray; default: uniproc for one rank, mp for several"
    )
    step_timeout_s: float = option(
        300.0, "maximum duration of a step on ranks in other processes; then they are considered stuck and killed"
    )
    engine_process: bool | None = option(
        None, "run the engine core in a separate process; default: yes for async programs, no for offline batches"
    )
    eep_scale_up: bool = option(False, "not supported: the number of ranks is fixed at start-up")
    enable_elastic_ep: bool = option(False, "not supported: the number of ranks is fixed at start-up")
    stats_interval_s: float = option(10.0, "seconds between log lines with engine statistics; 0: none")
    trust_remote_code: bool = option(False, "not supported: Octavo never runs code from a checkpoint")

    def __post_init__(self) -> None:
        for spec in fields(self):
            check_type(spec.name, spec.type, getattr(self, spec.name))
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidParameterError(name, value, "an integer of at least 1")
        self._check_rest()
        if self.speculative_config is not None:
            SpeculativeConfig.parse(self.speculative_config)
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

        Raises:
            ModelNotFoundError, CheckpointError, UnsupportedModelError: about the model.
            InvalidParameterError: an option that does not fit this model.
        """
        with_weights = self.load_format != "dummy"
        path = resolve_model(self.model_name, self.revision, with_weights=with_weights)
        tokenizer_path = resolve_model(self.tokenizer, with_weights=False) if self.tokenizer else path
        model = read_model_config(path, model=self.model_name, dtype=self.dtype, max_model_len=self.max_model_len)
        parallel = ParallelConfig(
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            data_parallel_size=self.data_parallel_size,
            enable_expert_parallel=self.enable_expert_parallel,
            distributed_executor_backend=self.distributed_executor_backend,
            step_timeout_s=self.step_timeout_s,
        )
        check_parallel(model, parallel)
        check_vision(model, self.tensor_parallel_size)
        whole_span = largest_whole_span(model.vision, self.max_num_seqs, self.max_num_batched_tokens)
        quantization, model = resolve_quantization(self.quantization, model, path)
        speculative = None if self.speculative_config is None else SpeculativeConfig.parse(self.speculative_config)
        return EngineConfig(
            model=model,
            cache=CacheConfig(
                block_size=self.block_size,
                kv_cache_dtype=self.kv_cache_dtype,
                num_kv_blocks=self.num_kv_blocks,
                gpu_memory_utilization=self.gpu_memory_utilization,
                enable_prefix_caching=self.enable_prefix_caching,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=min(self.max_num_seqs, self.max_num_batched_tokens),  # every running request gets a token
                max_num_batched_tokens=self.max_num_batched_tokens,
                ageing_s=self.priority_ageing_s,
                encoder_cache_tokens=self._encoder_cache_tokens(model),
                largest_whole_span=whole_span,
                step_target_s=self.step_target_s or 0.0,
            ),
            load=LoadConfig(
                load_format=self.load_format,
                seed=self.seed or 0,
                tensorizer_uri=self.tensorizer_uri,
                packed_cache_bytes=int(self.packed_cache_gib * 2**30),
            ),
            quantization=quantization,
            is_dtype_auto=self.dtype == "auto",
            device=self.device,
            threads=self.threads,
            enforce_eager=self.enforce_eager,
            deterministic=self.deterministic,
            speculative=speculative,
            draft_model=resolve_drafting(speculative, model, parallel, with_weights=with_weights),
            lora=self._lora(),
            parallel=parallel,
            tokenizer_path=str(tokenizer_path),
            use_generation_config=self.generation_config == "auto",
            seed=self.seed,
        )

    def _lora(self) -> LoraConfig | None:
        sizes = {name: getattr(self, name) for name in _LORA_SIZES}
        if self.enable_lora:
            return LoraConfig.of(**sizes, experts=self.lora_experts)
        if self.lora_experts:
            raise InvalidParameterError("lora_experts", True, "false: it has no effect without enable_lora")
        for name, value in sizes.items():
            if value is not None:
                raise InvalidParameterError(name, value, "unset: it has no effect without enable_lora")
        return None

    def _encoder_cache_tokens(self, model: ModelConfig) -> int:
        if model.vision is None:
            return 0
        return self.encoder_cache_tokens or min(_ENCODER_CACHE_TOKENS, model.max_model_len)

    def _check_rest(self) -> None:
        if self.trust_remote_code:
            raise InvalidParameterError(
                "trust_remote_code", True, "not supported: Octavo never runs code from a checkpoint"
            )
        for name in ("eep_scale_up", "enable_elastic_ep"):
            if getattr(self, name):
                limit = "not supported: the number of ranks is fixed at start-up; start another engine instead"
                raise InvalidParameterError(name, True, limit)
        if self.tensorizer_uri is not None and self.load_format not in ("auto", "tensorizer"):
            limit = f"unset: it has no effect with load_format={self.load_format!r}"
            raise InvalidParameterError("tensorizer_uri", self.tensorizer_uri, limit)
        if self.max_model_len == 1:
            raise InvalidParameterError("max_model_len", 1, "at least 2: one token of prompt and one of output")
        utilization = self.gpu_memory_utilization
        if utilization is not None and not 0.0 < utilization <= 1.0:
            raise InvalidParameterError("gpu_memory_utilization", utilization, "greater than 0 and at most 1")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise InvalidParameterError("seed", self.seed, "between 0 and 2^64 - 1")
        self._check_amounts()

    def _check_amounts(self) -> None:
        for name in ("priority_ageing_s", "step_timeout_s"):
            if not getattr(self, name) > 0.0:  # also catches NaN
                raise InvalidParameterError(name, getattr(self, name), "greater than 0")
        for name in ("stats_interval_s", "packed_cache_gib", "step_target_s"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < math.inf:
                raise InvalidParameterError(name, value, "a finite number of at least 0")
