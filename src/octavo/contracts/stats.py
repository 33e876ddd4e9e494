"""Numbers that the engine reports about itself."""

from collections.abc import Iterable

import msgspec


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot after a step. Totals count from the start of the core; when it has ended, only they are left."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0  # of a core that lives at least 1
    num_preemptions_total: int = 0
    num_prefix_queries_total: int = 0  # prompt tokens that looked for a cached block
    num_prefix_hits_total: int = 0  # prompt tokens that found one

    @property
    def kv_cache_usage(self) -> float:
        """Fraction of blocks in use, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0

    def ended(self) -> "SchedulerStats":
        """Return what is left of it when its core has ended."""
        return msgspec.structs.replace(self, num_running=0, num_waiting=0, num_free_blocks=0, num_blocks=0)

    @classmethod
    def sum(cls, parts: Iterable["SchedulerStats"]) -> "SchedulerStats":
        """Return the numbers of several cores as if they were one."""
        rows = [msgspec.structs.astuple(part) for part in parts]
        return cls(**dict(zip(cls.__struct_fields__, map(sum, zip(*rows, strict=True)), strict=True)))


class ExpertLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens have chosen each expert since the start, a shared one aside. Bytes: there may be thousands."""

    layers: list[int]  # those that have experts, on the stage that answers
    counts: bytes  # [layers, experts] int64, in the machine's order

    def of_layers(self) -> dict[int, list[int]]:
        """Return the tokens of each expert, by layer."""
        counts = memoryview(self.counts).cast("q").tolist()
        num_experts = len(counts) // len(self.layers)
        return {layer: counts[at * num_experts : (at + 1) * num_experts] for at, layer in enumerate(self.layers)}
