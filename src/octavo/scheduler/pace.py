"""How many tokens a step may compute to end in time, so that no stream stalls behind a long prompt; and busy time.

A step of 2,048 tokens takes 20 ms on a GPU and many seconds on a laptop. Chunking does not change a bit of the output,
so chunk sizes may depend on measured time.
"""

from octavo.contracts.schedule import SchedulerOutput
from octavo.scheduler.running import RunningRows

FEWEST_TOKENS = 32  # of prompts per step, however slow; chunks are multiples of it: whole tiles and blocks
FIRST_TOKENS = 256  # until there are measurements
_PATIENCE = 4.0  # times the target while no request has output yet: only new arrivals are delayed
_PROMPT_TOKENS_PER_STREAM = 4  # a step has this many if they take at most ...
_MAX_STRETCH = 2.0  # ... this many times the target
_MEMORY = 0.5  # weight of the past in the next estimate


class StepPace:
    """Measures how long prompt tokens take, and grants as many as fit into `target_s` seconds.

    If a decode step alone is slow because the weights are large, a chunk may take twice as long: smaller ones would
    read the weights again and again for a few tokens. The same holds if many streams leave little room for prompts:
    otherwise the queue would grow forever as new requests replace finished ones. Owned by the scheduler. With
    `target_s` of 0 the budget is always `max_num_batched_tokens`.
    """

    def __init__(self, max_num_batched_tokens: int, target_s: float, fewest: int = FEWEST_TOKENS) -> None:
        self._max_tokens, self._fewest = max_num_batched_tokens, fewest
        self._target_s = target_s
        self.token_s: float | None = None  # per prompt token, including its share of the step's overhead
        self.decode_s: float | None = None  # a step of single tokens
        self._last_output_s = 0.0  # when the latest output was recorded

    def budget(self, running: RunningRows) -> int:
        """Return the token budget of the next step; every running request can advance in it."""
        if not self._target_s:
            return self._max_tokens
        num_streams = running.num_streams
        num_tokens = self._fitting(self._target_s * (1.0 if num_streams else _PATIENCE))
        wanted = _chunks((1 + _PROMPT_TOKENS_PER_STREAM) * num_streams + FEWEST_TOKENS - 1)
        if num_tokens < wanted:
            num_tokens = min(wanted, self._fitting(_MAX_STRETCH * self._target_s))
        return min(self._max_tokens, max(num_tokens, len(running) + self._fewest))

    def _fitting(self, target_s: float) -> int:
        if self.token_s is None:
            return FIRST_TOKENS
        target_s = max(target_s, 2.0 * (self.decode_s or 0.0))
        return _chunks(int(target_s / self.token_s))

    def record_step(self, output: SchedulerOutput, scheduled_s: float, now_s: float) -> float:
        """Record the arrival of a step's output, scheduled at `scheduled_s`; return how long the step took."""
        before_s, self._last_output_s = self._last_output_s, now_s
        took_s = self._last_output_s - max(scheduled_s, before_s)  # several may be in flight
        num_tokens, num_rows = output.total_num_scheduled_tokens, len(output.req_ids)
        if output.scheduled_spec_decode_tokens is not None:  # these count as decoding
            num_tokens -= len(output.scheduled_spec_decode_tokens.token_ids)
        if took_s <= 0.0 or output.scheduled_encoder_inputs:  # the wall clock was adjusted, or images took time too
            return 0.0
        if num_tokens == num_rows:
            self.decode_s = _mean(self.decode_s, took_s)
        elif num_tokens >= num_rows + FEWEST_TOKENS // 2:  # per token, short chunks cost far more than long ones
            self.token_s = _mean(self.token_s, took_s / num_tokens)
        return took_s


class BusyTime:
    """The total time of steps whose native calls are timed, and the part in these calls; the rest is the host's."""

    def __init__(self) -> None:
        self._last_output_s: float | None = None  # None: nothing was left to do since
        self.step_s = self.compute_s = 0.0

    def record_output(self, compute_s: float | None, scheduled_s: float, now_s: float) -> None:
        """Record the arrival of a step's output: scheduled at `scheduled_s`, it computed for `compute_s` seconds.

        If there was work left after the previous step, this one begins when that step's output arrived: scheduling,
        detokenizing and sending then take time in which the engine could have computed.
        """
        start_s = scheduled_s if self._last_output_s is None else self._last_output_s
        self._last_output_s = now_s
        if compute_s is not None and compute_s <= now_s - start_s:  # not if the clock was set
            self.step_s += now_s - start_s
            self.compute_s += compute_s

    def pause(self) -> None:
        """Nothing is left to do."""
        self._last_output_s = None


def _chunks(num_tokens: int) -> int:
    return num_tokens // FEWEST_TOKENS * FEWEST_TOKENS


def _mean(known: float | None, new: float) -> float:
    return new if known is None else _MEMORY * known + (1.0 - _MEMORY) * new
