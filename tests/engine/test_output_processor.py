"""A sample's state in front of the core: tokens that come twice, as after a replay, count once."""

from octavo.contracts.engine import TokenLogprobs
from octavo.demo import demo_model_path
from octavo.engine.output_processor import CompletionState
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
