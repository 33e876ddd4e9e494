"""A sample's state in front of the core: tokens that come twice, as after a replay, count once."""

import pytest

from octavo.contracts.engine import FinishedRequest, TokenLogprobs
from octavo.demo import demo_model_path
from octavo.engine.output_processor import CompletionDelta, CompletionState
from octavo.engine.stop_strings import StopStringMatcher
from octavo.sampling_params import SamplingParams
from octavo.tokenizer.tokenizer import Tokenizer


def test_tokens_repeated_by_a_replay_are_skipped() -> None:
    tokenizer = Tokenizer.from_path(demo_model_path())
    token_ids = tokenizer.encode("one two three")
    state = CompletionState("r", SamplingParams(seed=1), [], tokenizer)
    no_logprobs: list[TokenLogprobs] = []
    state.push(0, token_ids[:2], no_logprobs)
    state.push(0, token_ids[:3], no_logprobs)  # one of them is new
    state.push(1, token_ids[1:3], no_logprobs)  # none is
    state.push(3, token_ids[3:], no_logprobs)
    assert state.token_ids == token_ids
    assert state.text == tokenizer.decode(token_ids)


@pytest.mark.parametrize("stop", [[], ["ee four"]])
def test_deltas_by_token_do_not_depend_on_the_tokens_of_a_step(stop: list[str]) -> None:
    """What a client gets after a restart is cut as before, though drafts may be accepted in other steps."""
    tokenizer = Tokenizer.from_path(demo_model_path())
    token_ids = tokenizer.encode("one two three four \U0001f642 five")

    def deltas(size: int, *, hides_last: bool = False) -> list[CompletionDelta]:
        params, taken = SamplingParams(seed=1, stop=stop), list[CompletionDelta]()
        matcher = StopStringMatcher(stop, False) if stop else None
        state = CompletionState("r", params, [], tokenizer, matcher)
        for start in range(0, len(token_ids), size):
            step, is_last = token_ids[start : start + size], start + size >= len(token_ids)
            if state.finish_reason is None:
                state.push(start, step, [], hides_last=hides_last and is_last)
                if is_last and state.finish_reason is None:
                    state.end(FinishedRequest(finish_reason="length"))
                taken += state.take_each(3)
        return taken

    for hides_last in (False, True):
        expected = deltas(1, hides_last=hides_last)
        assert [delta.token_ids for delta in expected] == [[token_id] for token_id in token_ids[: len(expected)]]
        assert "".join(delta.text for delta in expected).startswith("one two thr")
        assert expected[-1].finish_reason is not None
        for size in (2, 3, len(token_ids)):
            assert deltas(size, hides_last=hides_last) == expected
