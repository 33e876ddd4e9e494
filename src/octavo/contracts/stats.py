"""Statistics that the engine reports about itself."""

from collections.abc import Iterable, Sequence

import msgspec


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot after a step. Totals count from the start of the core and are all that remains after it has ended."""

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = (
        0  # of the waiting ones, those whose grammar is being compiled, or whose adapter has no slot yet
    )
    num_free_blocks: int = 0
    num_blocks: int = 0  # at least 1 while the core is alive
    num_preemptions_total: int = 0
    num_prefix_queries_total: int = 0  # prompt tokens looked up in the prefix cache
    num_prefix_hits_total: int = 0  # prompt tokens found in the prefix cache
    step_s_total: float = (
        0.0  # seconds of steps whose native calls are timed: while there is work, from output to output
    )
    compute_s_total: float = 0.0  # of these, in native calls; the rest is the host's, not hidden behind them

    @property
    def kv_cache_usage(self) -> float:
        """Fraction of blocks in use, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0

    def ended(self) -> "SchedulerStats":
        """Return what remains after the core has ended: the totals."""
        return msgspec.structs.replace(
            self, num_running=0, num_waiting=0, num_deferred=0, num_free_blocks=0, num_blocks=0
        )

    @classmethod
    def sum(cls, parts: Iterable["SchedulerStats"]) -> "SchedulerStats":
        """Return the combined statistics of several cores."""
        rows = [msgspec.structs.astuple(part) for part in parts]
        return cls(**dict(zip(cls.__struct_fields__, map(sum, zip(*rows, strict=True)), strict=True)))


class SpecDecodeStats(msgspec.Struct, frozen=True, kw_only=True):
    """Drafts verified and accepted since the start, by their position after the last known token."""

    proposed: list[int]
    accepted: list[int]
    draft_s: float = 0.0  # that a draft model took

    @property
    def num_drafts(self) -> int:
        """How often a request got at least one draft in a step."""
        return self.proposed[0]

    @classmethod
    def sum(cls, parts: Sequence["SpecDecodeStats"]) -> "SpecDecodeStats":
        """Return the combined counts of several cores with the same settings."""
        columns = [(part.proposed, part.accepted) for part in parts]
        proposed, accepted = ([sum(at) for at in zip(*lists, strict=True)] for lists in zip(*columns, strict=True))
        return cls(proposed=proposed, accepted=accepted, draft_s=sum(part.draft_s for part in parts))


class ExpertLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens routed to each expert since the start, except shared experts. Raw bytes, as there may be thousands."""

    layers: list[int]  # the MoE layers of the stage that replies
    counts: bytes  # [layers, experts] int64, native byte order

    def of_layers(self) -> dict[int, list[int]]:
        """Return the token counts of each expert, by layer."""
        counts = memoryview(self.counts).cast("q").tolist()
        num_experts = len(counts) // len(self.layers)
        return {layer: counts[at * num_experts : (at + 1) * num_experts] for at, layer in enumerate(self.layers)}
