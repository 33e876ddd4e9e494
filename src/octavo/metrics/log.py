"""Logs the engine's load every few seconds while there is work."""

import logging

from octavo.contracts.engine import SchedulerStats

logger = logging.getLogger(__name__)


class StatsLog:
    """Called after every step; logs when the interval has passed. An interval of 0 means never."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._last_s: float | None = None  # None: before the first step
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0

    def tick(self, now_s: float, stats: SchedulerStats, num_prompt_tokens: int, num_generation_tokens: int) -> None:
        """Record a step; totals count from the start."""
        if self._last_s is None:
            self._last_s = now_s
        elapsed_s = now_s - self._last_s
        if self._interval_s == 0.0 or elapsed_s < self._interval_s:
            return
        facts = {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "prompt_tokens_per_s": round((num_prompt_tokens - self._num_prompt_tokens) / elapsed_s, 1),
            "generation_tokens_per_s": round((num_generation_tokens - self._num_generation_tokens) / elapsed_s, 1),
            "kv_cache_usage": round(stats.kv_cache_usage, 3),
            "prefix_hit_rate": round(stats.num_prefix_hits_total / max(1, stats.num_prefix_queries_total), 3),
            "preemptions": stats.num_preemptions_total,
        }
        logger.info("load: %s", " ".join(f"{name}={value}" for name, value in facts.items()), extra={"facts": facts})
        self._last_s = now_s
        self._num_prompt_tokens, self._num_generation_tokens = num_prompt_tokens, num_generation_tokens
