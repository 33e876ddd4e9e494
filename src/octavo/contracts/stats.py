"""Numbers that the engine reports about itself."""

import msgspec


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot after a step. Totals count from the start of the core."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_preemptions_total: int
    num_prefix_queries_total: int  # prompt tokens that looked for a cached block
    num_prefix_hits_total: int  # prompt tokens that found one

    @property
    def kv_cache_usage(self) -> float:
        """Fraction of blocks in use, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_blocks
