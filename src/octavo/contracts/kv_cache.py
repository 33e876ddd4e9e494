"""Size and shape of KV memory."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCacheSpec:
    """Geometry of one rank's KV cache. One block holds `block_size` tokens in every layer."""

    num_layers: int
    num_kv_heads: int
    head_size: int  # elements of one head's key (or value) for one token, including padding
    block_size: int
    dtype_bytes: int

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * self.dtype_bytes

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """Memory measured before the KV pool is allocated, in bytes."""

    total_bytes: int  # of the device
    budget_bytes: int  # gpu_memory_utilization of the total, less if others already use it
    weights_bytes: int
    activation_bytes: int  # peak of one step beyond the weights
    graph_bytes: int = 0  # of captured graphs
    kv_bytes: int  # left for KV blocks
