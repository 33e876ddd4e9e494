"""The resolved settings of one engine, made by `EngineArgs.resolve()` and never changed afterwards."""

from dataclasses import dataclass, field
from typing import Literal

from octavo.config.model import ModelConfig, QuantizationName
from octavo.config.parallel import ParallelConfig
from octavo.config.speculative import DraftModelConfig, SpeculativeConfig
from octavo.errors import InvalidParameterError

KVCacheDType = Literal["auto", "bf16", "int8", "fp8"]
LoadFormat = Literal["auto", "safetensors", "pt", "gguf", "tensorizer", "sharded_state", "dummy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """KV memory."""

    block_size: int  # tokens per block
    num_kv_blocks: int | None  # None: as many as fit into the measured memory
    gpu_memory_utilization: float | None  # fraction of the device's memory; None: the device's default
    enable_prefix_caching: bool
    kv_cache_dtype: KVCacheDType = "auto"  # auto: the model's
    prefix_disk_bytes: int = 0  # maximum size of KV blocks that one engine keeps on disk; 0: none


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Admission, and the token budget of a step."""

    max_num_seqs: int  # maximum number of running requests
    max_num_batched_tokens: int  # maximum tokens computed in one step
    ageing_s: float  # seconds of waiting that raise a request by one priority class
    encoder_cache_tokens: int = 0  # maximum tokens of images whose embeddings ranks keep
    largest_whole_span: int = 0  # tokens that a step must not split: an image's, if they attend to each other
    step_target_s: float = 0.0  # prefill chunks are sized so that a step takes this long; 0: not limited


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadConfig:
    """Where weights come from."""

    load_format: LoadFormat
    seed: int  # for dummy weights
    tensorizer_uri: str | None = None  # file or http(s) address of the weights; None: in the model's folder
    packed_cache_bytes: int = 0  # maximum size of the cache of packed weights on disk; 0: no cache


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Memory for LoRA adapters. `max_loras` slots of `max_lora_rank` are allocated on every rank at start-up.

    Raises InvalidParameterError: names the option, its value and the limit.
    """

    max_loras: int = 4  # slots: different adapters in one step
    max_lora_rank: int = 16
    max_cpu_loras: int  # adapters in each rank's host cache, at least one per slot
    experts: bool = False  # each expert of a mixture has slots, too

    def __post_init__(self) -> None:
        if not 1 <= self.max_lora_rank <= 512:
            raise InvalidParameterError("max_lora_rank", self.max_lora_rank, "between 1 and 512")
        if self.max_cpu_loras < self.max_loras:
            limit = f"at least max_loras ({self.max_loras}): each adapter in a slot has a copy on the host"
            raise InvalidParameterError("max_cpu_loras", self.max_cpu_loras, limit)


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisionConfig:
    """What happens when an engine core in a process of its own dies or is stuck."""

    max_restarts: int = 16  # in a row, of cores that compute nothing; 0: the engine dies with its cores
    stall_timeout_s: float = 300.0  # without a step, though there are requests; then it is killed; 0: never
    hot_standby: bool = False  # a core is loaded that takes over
    spare_process: bool = False  # a process has done its imports, so that the next core loads at once


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Everything that the core, the executor and the worker need to know."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    load: LoadConfig
    quantization: QuantizationName | None  # of linear weights, at load time; None: as in the checkpoint
    is_dtype_auto: bool = False  # `model.dtype` is the checkpoint's; the worker may compute in another
    device: str  # auto, cpu, cuda, mps or xpu; resolved by the worker, because that needs torch
    threads: int | None = None  # CPU threads; None: one per core available to this process
    enforce_eager: bool = False  # no captured graphs
    deterministic: bool = False  # only batch-invariant kernels
    speculative: SpeculativeConfig | None = None
    draft_model: DraftModelConfig | None = None  # of `speculative`, if that is its method
    lora: LoraConfig | None = None  # None: no adapters
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    supervision: SupervisionConfig = field(default_factory=SupervisionConfig)
    tokenizer_path: str
    use_generation_config: bool  # take sampling defaults from the checkpoint
    seed: int | None  # base of the seeds of requests without one; None: random
