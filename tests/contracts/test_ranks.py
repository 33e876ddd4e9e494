"""Messages between an executor and its ranks arrive unchanged."""

from typing import Any

import msgspec
import numpy as np
import pytest

from octavo.contracts.engine import EmbeddingSpan, ExtraInputs, TokenLogprobs
from octavo.contracts.ranks import (
    FromRank,
    RankCall,
    RankFailure,
    RankResult,
    decode_rank_message,
    encode_rank_message,
)
from octavo.contracts.schedule import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    SlotFill,
    SpecDecodeTokens,
    TokenMasks,
)
from octavo.sampling_params import SamplingParams
from octavo.structured_output import StructuredOutput


def ints(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


ORDER = SchedulerOutput(
    step=7,
    req_ids=("a", "b"),
    rows=ints(0, 3),
    num_computed_tokens=ints(5, 2**31 - 1),
    num_scheduled_tokens=ints(1, 1),
    samples=np.array([True, False]),
    total_num_scheduled_tokens=2,
    scheduled_new_reqs=[
        NewRequestData(
            request_id="b",
            row=3,
            token_ids=ints(4, 5, 6),
            num_prompt_tokens=2,
            sampling_params=SamplingParams(
                seed=2**64 - 1, stop=["x"], logit_bias={3: 1.5}, structured_output=StructuredOutput(regex="a+")
            ),
            eos_token_ids=[2],
            bad_words_token_ids=[[1, 2], [3]],
            block_ids=[[9], [8]],
            num_computed_tokens=0,
            extra_inputs=ExtraInputs(
                rotary_positions=bytes(24),
                embedding_spans=[EmbeddingSpan(start=1, num_tokens=1, embeddings=b"\x00\xff\x00\x01")],
            ),
            adapter_slot=3,
        )
    ],
    scheduled_cached_reqs=CachedRequestData(rows=ints(), block_ids=ints()),
    finished_req_ids=["c"],
    token_masks=TokenMasks(logits_rows=ints(3), words=ints(1, -1, 0, 5).reshape(1, 4)),
    adapter_fills=(SlotFill(slot=3, content_hash="ab"),),
    scheduled_spec_decode_tokens=SpecDecodeTokens(counts=ints(2, 0), token_ids=ints(8, 9)),
)
ANSWER = ModelRunnerOutput(
    req_ids=("a",),
    sampled_token_ids=ints(17).reshape(1, 1),
    num_sampled=ints(1),
    logprobs={"a": [TokenLogprobs(token_ids=[17, 3], logprobs=[-0.25, -2.0], rank=1)]},
    prompt_logprobs={"a": [None, TokenLogprobs(token_ids=[4], logprobs=[-1.0], rank=2)]},
    errors={"b": "NaN"},
    draft_passes=[(2, 0.25), (1, 0.125)],
)


def assert_same(one: Any, other: Any) -> None:
    """Compare deeply; columns by dtype, shape and values."""
    if isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tolist() == other.tolist()
        return
    assert type(one) is type(other)
    fields = getattr(type(one), "__struct_fields__", None) or getattr(type(one), "__dataclass_fields__", None)
    if fields:
        for name in fields:
            assert_same(getattr(one, name), getattr(other, name))
    elif isinstance(one, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    else:
        assert one == other


def test_an_order() -> None:
    arrived = decode_rank_message(encode_rank_message(ORDER))
    assert_same(ORDER, arrived)
    assert isinstance(arrived, SchedulerOutput)
    assert arrived.rows.flags.writeable  # torch shares its memory


def test_a_call() -> None:
    call = RankCall(call_id=7, method="initialize_kv_cache", arguments=[[64, 32]])
    assert decode_rank_message(encode_rank_message(call)) == call


@pytest.mark.parametrize(
    "message",
    [
        ANSWER,
        RankResult(call_id=7, value=None),
        RankResult(call_id=7, value="cpu"),
        RankFailure(error_type="ValueError", message="", traceback="...", step=3),
    ],
)
def test_replies(message: FromRank) -> None:
    assert_same(message, decode_rank_message(bytes(encode_rank_message(message))))


def test_columns_of_other_types_are_refused() -> None:
    with pytest.raises(AssertionError, match="float64"):
        encode_rank_message(msgspec.structs.replace(ANSWER, num_sampled=np.zeros(1)))
