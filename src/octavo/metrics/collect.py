"""Statistics of an engine's requests, as totals and histograms.

Updated by the output processor once per step and when requests start or end; nothing is done per token.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from octavo.contracts.engine import EngineCoreOutputs
from octavo.contracts.stats import ExpertLoad, SchedulerStats, SpecDecodeStats
from octavo.metrics.histogram import Histogram, powers_of_two
from octavo.metrics.log import StatsLog
from octavo.outputs import RequestMetrics

# Seconds. Requests: from the demo model on one core to long reasoning of a large model.
_REQUEST_BOUNDS = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    60.0,
    120.0,
    300.0,
    600.0,
    1800.0,
)
_TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.6, 5.0, 20.0)


class EngineMetrics:
    """Totals since the start. Owned by the thread that processes outputs. Times are in seconds of the wall clock."""

    def __init__(self, stats_interval_s: float = 0.0) -> None:
        self.stats: SchedulerStats | None = None  # as of the latest step, summed over replicas
        self.stats_by_replica: dict[int, SchedulerStats] = {}
        self.expert_load_by_replica: dict[int, ExpertLoad] = {}  # of MoE models
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.spec_decode_by_replica: dict[int, SpecDecodeStats] = {}  # of engines with a drafter
        self.finished: Counter[str] = Counter()  # samples by finish reason
        self.time_to_first_token = Histogram(_REQUEST_BOUNDS)
        self.inter_token_latency = Histogram(_TOKEN_BOUNDS)
        self.time_per_output_token = Histogram(_TOKEN_BOUNDS)  # mean per request
        self.duration = Histogram(_REQUEST_BOUNDS)
        self.queue_time = Histogram(_REQUEST_BOUNDS)
        self.prefill_time = Histogram(_REQUEST_BOUNDS)
        self.decode_time = Histogram(_REQUEST_BOUNDS)
        self.prompt_tokens = Histogram(powers_of_two(0, 20))
        self.generation_tokens = Histogram(powers_of_two(0, 20))
        self.max_generation_tokens = Histogram(powers_of_two(0, 20))  # of the longest sample of each request
        self.step_tokens = Histogram(powers_of_two(0, 16))
        self._log = StatsLog(stats_interval_s)

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
        if outputs.spec_decode is not None:
            self.spec_decode_by_replica[outputs.replica] = outputs.spec_decode
        if self.stats is not None:
            self._log.tick(now_s, self.stats, self.num_prompt_tokens, self.num_generation_tokens)

    def record_first_token(self, arrival_time_s: float, num_prompt_tokens: int, now_s: float) -> None:
        """Record that a request got its first token: its prompt has been computed."""
        self.num_prompt_tokens += num_prompt_tokens
        self.time_to_first_token.observe(now_s - arrival_time_s)

    def record_end(self, times: RequestMetrics, num_prompt_tokens: int, samples: Sequence[tuple[str, int]]) -> None:
        """Record the end of a request. `samples`: finish reason and number of tokens of each."""
        assert times.finished_time_s is not None
        self.finished.update(reason for reason, _ in samples)
        self.duration.observe(times.finished_time_s - times.arrival_time_s)
        self.prompt_tokens.observe(num_prompt_tokens)
        for _, num_tokens in samples:
            self.generation_tokens.observe(num_tokens)
        longest = max(num_tokens for _, num_tokens in samples)
        self.max_generation_tokens.observe(longest)
        if times.first_scheduled_time_s is not None:
            self.queue_time.observe(times.first_scheduled_time_s - times.arrival_time_s)
            if times.first_token_time_s is not None:
                self.prefill_time.observe(times.first_token_time_s - times.first_scheduled_time_s)
        if times.first_token_time_s is not None:
            decode_time_s = times.finished_time_s - times.first_token_time_s
            self.decode_time.observe(decode_time_s)
            if longest > 1:
                self.time_per_output_token.observe(decode_time_s / (longest - 1))
