"""The resolved settings of one engine. `EngineArgs.resolve()` makes it; nothing changes it afterwards."""

from dataclasses import dataclass, field
from typing import Literal

from octavo.config.model import ModelConfig
from octavo.config.parallel import ParallelConfig

KVCacheDType = Literal["auto", "bf16", "int8", "fp8"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
QuantizationName = Literal["int8", "int4", "fp8"]
LATER_LOAD_FORMATS = ("pt", "gguf", "tensorizer")  # known, and not read yet


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """KV memory."""

    block_size: int  # tokens per block
    num_kv_blocks: int | None  # None: as many as the measured memory allows
    gpu_memory_utilization: float | None  # fraction of the device's memory; None: the device's own default
    enable_prefix_caching: bool
    kv_cache_dtype: KVCacheDType = "auto"  # auto: the model's


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Admission and the token budget of a step."""

    max_num_seqs: int  # requests running at once
    max_num_batched_tokens: int  # most tokens computed in one step
    ageing_s: float  # waiting this long lifts a request by one priority class
    step_target_s: float = 0.0  # chunks of prompts are made so small that a step takes this long; 0: they are not


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadConfig:
    """Where weights come from."""

    load_format: LoadFormat
    seed: int  # of dummy weights
    packed_cache_bytes: int = 0  # most bytes of packed weights kept on disk; 0: none are kept or looked for


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Everything that the core, the executor and the worker need to know."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    load: LoadConfig
    quantization: QuantizationName | None  # of linear weights, made at load; None: they stay as they are
    device: str  # auto, cpu, cuda, mps or xpu; the worker resolves it, because that needs torch
    threads: int | None = None  # of a CPU; None: as many as the cores that this process may keep busy
    enforce_eager: bool = False  # no captured graphs
    deterministic: bool = False  # only kernels that give a row the same bits in any batch
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    tokenizer_path: str
    use_generation_config: bool  # take sampling defaults from the checkpoint
    seed: int | None  # derives the seeds of requests that bring none; None: those are random
