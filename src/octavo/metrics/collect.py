"""Statistics of an engine's requests, as totals and histograms, and of the HTTP side; a log line of the engine's load.

Updated by the output processor once per step and when requests start or end; nothing is done per token.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from octavo.contracts.engine import (
    AdapterEvents,
    EngineCoreOutputs,
    EngineCoreRequest,
    ExpertLoad,
    SchedulerStats,
    SpecDecodeStats,
)
from octavo.metrics.histogram import FIRST_TOKEN, REQUEST, SAMPLES, SIZES, STEP, TOKEN, Histogram
from octavo.outputs import RequestMetrics

logger = logging.getLogger("octavo.metrics.log")


@dataclass(slots=True)
class HttpMetrics:
    """Totals since the start. Updated only by the middleware, in the event loop."""

    num_in_flight: int = 0  # requests without a complete response
    responses: Counter[int] = field(default_factory=Counter)  # by status; 499: the client disconnected first
    # By method, route, class: ("GET", "/", "2xx").
    requests: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    rejections: Counter[str] = field(default_factory=Counter)  # by cause: the `code` of the error
    num_client_aborts: int = 0  # clients that disconnected before the end of their response
    num_bytes_sent: int = 0  # bodies only


class AdapterMetrics:
    """Counts by the adapters' names. Owned by the thread that processes outputs."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()  # that have ended
        self.loads: Counter[str] = Counter()  # into the host caches
        self.evictions: Counter[str] = Counter()  # from them
        self.waiting: Counter[str] = Counter()  # requests of which nothing has run yet
        self.running: Counter[str] = Counter()

    def record_arrival(self, name: str) -> None:
        self.waiting[name] += 1

    def record_start(self, name: str) -> None:
        self.waiting -= Counter([name])  # keeps positive counts
        self.running[name] += 1

    def record_end(self, name: str, *, has_run: bool) -> None:
        if has_run:
            self.running -= Counter([name])
        else:
            self.waiting -= Counter([name])
        self.requests[name] += 1

    def record_events(self, events: AdapterEvents) -> None:
        self.loads.update(events.loads)
        self.evictions.update(events.evictions)

    def num_unfinished(self, name: str) -> int:
        return self.waiting[name] + self.running[name]


class EngineMetrics:
    """Totals since the start. Owned by the thread that processes outputs. Times are in seconds of the wall clock."""

    def __init__(
        self,
        stats_interval_s: float = 0.0,
        cache_info: Mapping[str, str] | None = None,
        max_loras: int | None = None,
    ) -> None:
        self.max_loras = max_loras  # None: no adapters
        self.cache_info = dict(cache_info or {})  # settings of the KV cache, as text
        self.stats: SchedulerStats | None = None  # as of the latest step, summed over replicas
        self.stats_by_replica: dict[int, SchedulerStats] = {}
        self.expert_load_by_replica: dict[int, ExpertLoad] = {}  # of MoE models
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.spec_decode_by_replica: dict[int, SpecDecodeStats] = {}  # of engines that speculate
        self.finished: Counter[str] = Counter()  # samples by finish reason
        self.time_to_first_token = Histogram(*FIRST_TOKEN)
        self.inter_token_latency = Histogram(*TOKEN)
        self.time_per_output_token = Histogram(*TOKEN)  # mean per request
        self.duration = Histogram(*REQUEST)
        self.queue_time = Histogram(*REQUEST)
        self.prefill_time = Histogram(*REQUEST)
        self.decode_time = Histogram(*REQUEST)
        self.inference_time = Histogram(*REQUEST)  # prefill and decode
        self.time_per_prefill_token = Histogram(*TOKEN)  # mean per request, without cached tokens
        self.prompt_tokens = Histogram(*SIZES)
        self.generation_tokens = Histogram(*SIZES)
        self.max_generation_tokens = Histogram(*SIZES)  # of the longest sample of each request
        self.num_samples = Histogram(*SAMPLES)  # of each request
        self.max_tokens = Histogram(*SIZES)  # allowed to each request
        self.step_tokens = Histogram(*STEP)
        self.adapters = AdapterMetrics()
        # The log line of the engine's load: its interval (0: never), and time and totals of the last one.
        self._stats_interval_s = stats_interval_s
        self._logged_s: float | None = None  # None: before the first step
        self._logged_tokens = 0, 0

    @property
    def lost_replicas(self) -> list[int]:
        """Replicas whose core has ended."""
        return sorted(replica for replica, stats in self.stats_by_replica.items() if not stats.num_blocks)

    def record_step(self, outputs: EngineCoreOutputs, num_by_last_time: Mapping[float, int], now_s: float) -> None:
        """Record a step. `num_by_last_time` is the number of samples by the time of their previous token."""
        self.num_generation_tokens += len(outputs.new_token_ids)
        if outputs.num_scheduled_tokens:
            self.step_tokens.observe(outputs.num_scheduled_tokens)
        for last_s, count in num_by_last_time.items():
            self.inter_token_latency.observe(now_s - last_s, count)
        if outputs.stats is not None:
            self.stats_by_replica[outputs.replica] = outputs.stats
            self.stats = SchedulerStats.sum(self.stats_by_replica.values())
        if outputs.expert_load is not None:
            self.expert_load_by_replica[outputs.replica] = outputs.expert_load
        if outputs.adapter_events is not None:
            self.adapters.record_events(outputs.adapter_events)
        if outputs.spec_decode is not None:
            self.spec_decode_by_replica[outputs.replica] = outputs.spec_decode
        if self.stats is not None:
            self._log_load(now_s, self.stats)

    def _log_load(self, now_s: float, stats: SchedulerStats) -> None:
        """Log the load if the interval has passed since the first step or the last line."""
        if self._logged_s is None:
            self._logged_s = now_s
        elapsed_s = now_s - self._logged_s
        if self._stats_interval_s == 0.0 or elapsed_s < self._stats_interval_s:
            return
        totals = self.num_prompt_tokens, self.num_generation_tokens
        prompt_tokens, generation_tokens = (
            total - last for total, last in zip(totals, self._logged_tokens, strict=True)
        )
        facts = {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "prompt_tokens_per_s": round(prompt_tokens / elapsed_s, 1),
            "generation_tokens_per_s": round(generation_tokens / elapsed_s, 1),
            "kv_cache_usage": round(stats.kv_cache_usage, 3),
            "prefix_hit_rate": round(stats.num_prefix_hits_total / max(1, stats.num_prefix_queries_total), 3),
            "preemptions": stats.num_preemptions_total,
        }
        logger.info("load: %s", " ".join(f"{name}={value}" for name, value in facts.items()), extra={"facts": facts})
        self._logged_s, self._logged_tokens = now_s, totals

    def record_arrival(self, request: EngineCoreRequest) -> None:
        """Record a request that is about to be sent to the core."""
        if request.adapter is not None:
            self.adapters.record_arrival(request.adapter.name)

    def record_start(self, request: EngineCoreRequest) -> None:
        """Record that the first of its samples has run."""
        if request.adapter is not None:
            self.adapters.record_start(request.adapter.name)

    def record_departure(self, request: EngineCoreRequest, *, has_run: bool) -> None:
        """Record that a request has left the core, or has not reached it."""
        if request.adapter is not None:
            self.adapters.record_end(request.adapter.name, has_run=has_run)

    def record_first_token(self, arrival_time_s: float, num_prompt_tokens: int, now_s: float) -> None:
        """Record that a request got its first token: its prompt has been computed."""
        self.num_prompt_tokens += num_prompt_tokens
        self.time_to_first_token.observe(now_s - arrival_time_s)

    def record_end(
        self,
        times: RequestMetrics,
        num_prompt_tokens: int,
        samples: Sequence[tuple[str, int]],
        max_tokens: int | None = None,
    ) -> None:
        """Record the end of a request. `samples`: finish reason and number of tokens of each."""
        assert times.finished_time_s is not None
        self.num_samples.observe(len(samples))
        if max_tokens is not None:
            self.max_tokens.observe(max_tokens)
        self.finished.update(reason for reason, _ in samples)
        self.duration.observe(times.finished_time_s - times.arrival_time_s)
        self.prompt_tokens.observe(num_prompt_tokens)
        for _, num_tokens in samples:
            self.generation_tokens.observe(num_tokens)
        longest = max(num_tokens for _, num_tokens in samples)
        self.max_generation_tokens.observe(longest)
        if times.first_scheduled_time_s is not None:
            self.queue_time.observe(times.first_scheduled_time_s - times.arrival_time_s)
            self.inference_time.observe(times.finished_time_s - times.first_scheduled_time_s)
            if times.first_token_time_s is not None:
                prefill_time_s = times.first_token_time_s - times.first_scheduled_time_s
                self.prefill_time.observe(prefill_time_s)
                self.time_per_prefill_token.observe(
                    prefill_time_s / max(1, num_prompt_tokens - times.num_cached_tokens)
                )
        if times.first_token_time_s is not None:
            decode_time_s = times.finished_time_s - times.first_token_time_s
            self.decode_time.observe(decode_time_s)
            if longest > 1:
                self.time_per_output_token.observe(decode_time_s / (longest - 1))
