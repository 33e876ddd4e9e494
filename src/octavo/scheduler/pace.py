"""How many tokens a step may compute so that it ends in time: no stream shall stand still behind a long prompt.

A step of 2,048 tokens takes 20 ms on a GPU and many seconds on a laptop. How prompts are cut does not change a bit of
what comes out, so it may follow the clock.
"""

from collections.abc import Callable

from octavo.contracts.schedule import SchedulerOutput
from octavo.scheduler.running import RunningRows

FEWEST_TOKENS = 32  # of prompts in a step, whatever it takes; also what chunks are multiples of: whole tiles and blocks
FIRST_TOKENS = 256  # while nothing is known
_PATIENCE = 4.0  # times the target may pass where nobody has had a token yet: then only who comes next would notice
_PROMPT_TOKENS_PER_STREAM = 4  # a step takes in so many where that is done within ...
_MAX_STRETCH = 2.0  # ... so many times the target
_MEMORY = 0.5  # what the past weighs in the next estimate


class StepPace:
    """Learns from steps how long prompts take, and grants as many tokens as fit into `target_s` seconds.

    Where a decode step alone takes long, because the weights are large, a chunk may take twice as long: smaller ones
    would read the weights again and again for a few tokens. So it may where many streams leave it little room: as they
    end, others come, and prompts that a step has no room for would wait in a queue that never ends. Owned by the
    scheduler. With `target_s` of 0 the budget is `max_num_batched_tokens`, always.
    """

    def __init__(self, max_num_batched_tokens: int, target_s: float, clock: Callable[[], float]) -> None:
        self._max_tokens = max_num_batched_tokens
        self._target_s = target_s
        self._clock = clock
        self._token_s: float | None = None  # of a prompt, with its share of all that a step does
        self._decode_s: float | None = None  # a step of single tokens
        self._last_output_s = 0.0  # when the latest answer was booked

    def budget(self, running: RunningRows) -> int:
        """Return the tokens of the next step; every running request can advance in it."""
        if not self._target_s:
            return self._max_tokens
        num_streams = running.num_streams
        num_tokens = self._fitting(self._target_s * (1.0 if num_streams else _PATIENCE))
        wanted = _chunks((1 + _PROMPT_TOKENS_PER_STREAM) * num_streams + FEWEST_TOKENS - 1)
        if num_tokens < wanted:
            num_tokens = min(wanted, self._fitting(_MAX_STRETCH * self._target_s))
        return min(self._max_tokens, max(num_tokens, len(running) + FEWEST_TOKENS))

    def _fitting(self, target_s: float) -> int:
        if self._token_s is None:
            return FIRST_TOKENS
        target_s = max(target_s, 2.0 * (self._decode_s or 0.0))
        return _chunks(int(target_s / self._token_s))

    def record(self, output: SchedulerOutput, scheduled_s: float) -> None:
        """Take in that the answer to a step is here that was handed out at `scheduled_s`."""
        before_s, self._last_output_s = self._last_output_s, self._clock()
        took_s = self._last_output_s - max(scheduled_s, before_s)  # several may be under way
        num_tokens, num_rows = output.total_num_scheduled_tokens, len(output.req_ids)
        if output.scheduled_spec_decode_tokens is not None:  # drafts belong to a step of decoding
            num_tokens -= len(output.scheduled_spec_decode_tokens.token_ids)
        if took_s <= 0.0:  # the wall clock was set
            return
        if num_tokens == num_rows:
            self._decode_s = _mean(self._decode_s, took_s)
        elif num_tokens >= num_rows + FEWEST_TOKENS // 2:  # a token of a few costs far more than one of many
            self._token_s = _mean(self._token_s, took_s / num_tokens)


def _chunks(num_tokens: int) -> int:
    return num_tokens // FEWEST_TOKENS * FEWEST_TOKENS


def _mean(known: float | None, new: float) -> float:
    return new if known is None else _MEMORY * known + (1.0 - _MEMORY) * new
