"""Statistics of an engine's requests, as totals and histograms, and of the HTTP side; a log line of the engine's load.

Updated by the output processor once per step and when requests start or end; nothing is done per token. Histograms take
many equal values at once, as a busy frontend spends most of its time observing. Their bounds come in pairs: ours, and
vLLM's, which its dashboards expect under its names. Values are counted once, by both.
"""

import logging
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from octavo.contracts.engine import EngineCoreOutputs, EngineCoreRequest, ExpertLoad, SchedulerStats, SpecDecodeStats
from octavo.outputs import RequestMetrics

logger = logging.getLogger("octavo.metrics.log")

Views = tuple[tuple[float, ...], tuple[float, ...]]


class Histogram:
    """Counts values by upper bound, as Prometheus does; bounds are inclusive.

    `views` are sets of bounds, each of which can be shown.
    """

    __slots__ = ("_counts", "_views", "bounds", "sum")

    def __init__(self, *views: tuple[float, ...]) -> None:
        assert all(list(bounds) == sorted(set(bounds)) for bounds in views)
        self._views = views
        self.bounds = tuple(sorted(set().union(*views)))
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)  # the last is above all bounds

    def observe(self, value: float, count: int = 1) -> None:
        """Add `count` equal values."""
        self._counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self._counts)

    def cumulative(self, view: int = 0) -> Iterator[tuple[float, int]]:
        """Yield each bound of a view, infinity last, with the number of values up to it."""
        total = 0
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            total += count
            if bound in self._views[view] or bound == float("inf"):
                yield bound, total


def powers_of_two(first: int, last: int) -> tuple[float, ...]:
    """Return 2**first to 2**last, as bounds for numbers of tokens."""
    return tuple(float(2**power) for power in range(first, last + 1))


# Seconds. Ours: from the demo model on one core to long reasoning of a large model.
_REQUEST = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0, 1800.0,
)  # fmt: skip
_VLLM_REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
REQUEST: Views = (_REQUEST, _VLLM_REQUEST)
FIRST_TOKEN: Views = (
    _REQUEST,
    (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
        160.0, 640.0, 2560.0,
    ),
)  # fmt: skip
TOKEN: Views = (
    (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.6, 5.0, 20.0),
    (
        0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    ),
)  # fmt: skip
# Tokens.
SIZES: Views = (powers_of_two(0, 20), tuple(float(n * 10**power) for power in range(6) for n in (1, 2, 5)))
STEP: Views = (powers_of_two(0, 16), (1.0, *powers_of_two(3, 14)))
# Samples of a request.
SAMPLES: Views = ((1.0, 2.0, 5.0, 10.0, 20.0), (1.0, 2.0, 5.0, 10.0, 20.0))


@dataclass(slots=True)
class KeyUsage:
    """What the requests of a named key have used."""

    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class HttpMetrics:
    """Totals since the start. Updated only in the event loop, by the middleware and the runner of batches."""

    num_in_flight: int = 0  # requests without a complete response
    num_admitted: int = 0  # of these, the ones that make the engine compute
    responses: Counter[int] = field(default_factory=Counter)  # by status; 499: the client disconnected first
    # By method, route, class: ("GET", "/", "2xx").
    requests: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    rejections: Counter[str] = field(default_factory=Counter)  # by cause: the `code` of the error
    batch_lines: Counter[str] = field(default_factory=Counter)  # kept results, by outcome: answered, failed
    num_client_aborts: int = 0  # clients that disconnected before the end of their response
    num_bytes_sent: int = 0  # bodies only
    num_resumed: int = 0  # clients that came back for the rest of a stream
    num_replayed: int = 0  # clients that came back with the key of an answer
    num_kept_bytes: int = 0  # of answers whose clients may come back
    by_key: defaultdict[str, KeyUsage] = field(default_factory=lambda: defaultdict(KeyUsage))  # by the keys' names

    @contextmanager
    def counting_admitted(self) -> Generator[None, None, None]:
        """Count a request as one that makes the engine compute, during the block."""
        self.num_admitted += 1
        try:
            yield
        finally:
            self.num_admitted -= 1


@dataclass
class AdapterMetrics:
    """Counts by the adapters' names."""

    requests: Counter[str] = field(default_factory=Counter)  # that have ended
    loads: Counter[str] = field(default_factory=Counter)  # into the host caches
    evictions: Counter[str] = field(default_factory=Counter)  # from them
    waiting: Counter[str] = field(default_factory=Counter)  # requests of which nothing has run yet
    running: Counter[str] = field(default_factory=Counter)

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
        self.num_core_deaths = 0
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

    def record_step(self, outputs: EngineCoreOutputs, num_by_last_time: Mapping[float, int], now_s: float) -> None:
        """Record a step. `num_by_last_time` is the number of samples by the time of their previous token."""
        self.num_generation_tokens += len(outputs.new_token_ids)
        self.num_core_deaths += outputs.num_deaths
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
            self.adapters.loads.update(outputs.adapter_events.loads)
            self.adapters.evictions.update(outputs.adapter_events.evictions)
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
        rates = [round((now - last) / elapsed_s, 1) for now, last in zip(totals, self._logged_tokens, strict=True)]
        facts = {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "prompt_tokens_per_s": rates[0],
            "generation_tokens_per_s": rates[1],
            "kv_cache_usage": round(stats.kv_cache_usage, 3),
            "prefix_hit_rate": round(stats.num_prefix_hits_total / max(1, stats.num_prefix_queries_total), 3),
            "preemptions": stats.num_preemptions_total,
        }
        if stats.prefix_disk_bytes:
            facts["prefix_tokens_from_disk"] = stats.num_prefix_disk_hits_total
        logger.info("load: %s", " ".join(f"{name}={value}" for name, value in facts.items()), extra={"facts": facts})
        self._logged_s, self._logged_tokens = now_s, totals

    def record_arrival(self, request: EngineCoreRequest) -> None:
        """Record a request that is about to be sent to the core."""
        if request.adapter is not None:
            self.adapters.waiting[request.adapter.name] += 1

    def record_start(self, request: EngineCoreRequest) -> None:
        """Record that the first of its samples has run."""
        if request.adapter is not None:
            self.adapters.waiting -= Counter([request.adapter.name])  # keeps positive counts
            self.adapters.running[request.adapter.name] += 1

    def record_departure(self, request: EngineCoreRequest, *, has_run: bool) -> None:
        """Record that a request has left the core, or has not reached it."""
        if request.adapter is not None:
            self.adapters.requests[request.adapter.name] += 1
            if has_run:
                self.adapters.running -= Counter([request.adapter.name])
            else:
                self.adapters.waiting -= Counter([request.adapter.name])

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
                num_computed = max(1, num_prompt_tokens - times.num_cached_tokens)
                self.time_per_prefill_token.observe(prefill_time_s / num_computed)
        if times.first_token_time_s is not None:
            decode_time_s = times.finished_time_s - times.first_token_time_s
            self.decode_time.observe(decode_time_s)
            if longest > 1:
                self.time_per_output_token.observe(decode_time_s / (longest - 1))
