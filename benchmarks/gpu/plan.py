"""How large the measured things are: a GPU's sizes, or tiny ones that show on a CPU that everything runs."""

from dataclasses import dataclass
from typing import Any

from benchmarks.geometry import QWEN3_0_6B, QWEN3_8B, QWEN3_30B_A3B

TINY: dict[str, Any] = {
    **QWEN3_0_6B,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
TINY_MIXTURE: dict[str, Any] = {
    **QWEN3_30B_A3B,
    "hidden_size": 64,
    "moe_intermediate_size": 48,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of every section."""

    device: str
    dtype: str
    geometries: dict[str, dict[str, Any]]
    mixtures: dict[str, dict[str, Any]]  # whose experts are measured alone
    batches: tuple[int, ...]
    context: int  # tokens before a measured decode
    decode_steps: int
    prefill_tokens: int
    workload_requests: int
    workload_tokens: tuple[int, int]  # of a prompt, and of an output: at least, at most
    probe_bytes: int
    probe_matrix: int
    max_num_batched_tokens: int
    num_kv_blocks: int | None = None


FULL = Plan(
    device="cuda",
    dtype="bfloat16",
    geometries={"qwen3-0.6b": QWEN3_0_6B, "qwen3-8b": QWEN3_8B},
    mixtures={"qwen3-30b-a3b": QWEN3_30B_A3B},
    batches=(1, 32, 256),
    context=1024,
    decode_steps=64,
    prefill_tokens=8192,
    workload_requests=256,
    workload_tokens=(100, 1024),
    probe_bytes=4 << 30,
    probe_matrix=8192,
    max_num_batched_tokens=8192,
)
DRY = Plan(
    device="cpu",
    dtype="float32",
    geometries={"tiny": TINY},
    mixtures={"tiny-moe": TINY_MIXTURE},
    batches=(1, 3),
    context=24,
    decode_steps=3,
    prefill_tokens=48,
    workload_requests=4,
    workload_tokens=(4, 8),
    probe_bytes=1 << 20,
    probe_matrix=64,
    max_num_batched_tokens=64,
    num_kv_blocks=64,
)
