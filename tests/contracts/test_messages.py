"""Messages between processes: msgspec decodes what it encoded to an equal value."""

import pickle

import msgspec
import pytest

from octavo.contracts.engine import (
    AdmittedRequest,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishedRequest,
    SchedulerStats,
    TokenLogprobs,
)
from octavo.contracts.kv_cache import KVCacheSpec, KVGroup, KVGroupSpec, KVPart
from octavo.sampling_params import SamplingParams

REQUESTS = [
    EngineCoreRequest(
        request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams(), priority=2, arrival_time_s=0.0
    ),
    EngineCoreRequest(
        request_id="r-\u00e9",
        prompt_token_ids=[0, 151_935],
        sampling_params=SamplingParams(
            temperature=0.7,
            logit_bias={50256: -100.0, 7: 1.5},
            allowed_token_ids=[1, 2, 3],
            bad_words=["never"],
            stop=["END", "\n"],
            stop_token_ids=[9],
            max_tokens=None,
            seed=2**64 - 1,
            logprobs=0,
        ),
        priority=0,
        arrival_time_s=1.75e9,
        eos_token_ids=[151_645, 151_643],
        bad_words_token_ids=[[1, 2], [3]],
        cache_salt="tenant",
    ),
]
OUTPUTS = [
    EngineCoreOutputs(req_ids=[], num_new_tokens=[], first_indices=[], new_token_ids=[], num_scheduled_tokens=0),
    EngineCoreOutputs(
        req_ids=["a", "b"],
        num_new_tokens=[1, 1],
        first_indices=[0, 41],
        new_token_ids=[151_935, 0],
        num_scheduled_tokens=2048,
        admitted={"a": AdmittedRequest(scheduled_time_s=12.5, num_cached_tokens=64)},
        finished={"b": FinishedRequest(finish_reason="stop", stop_token_id=7, num_preemptions=2)},
        logprobs={"a": [TokenLogprobs(token_ids=[5, 6], logprobs=[-0.5, -1.25], rank=1)]},
        prompt_logprobs={"a": [None, TokenLogprobs(token_ids=[5], logprobs=[-0.1], rank=3)]},
        stats=SchedulerStats(
            num_running=1,
            num_waiting=2,
            num_free_blocks=3,
            num_blocks=4,
            num_preemptions_total=5,
            num_prefix_queries_total=6,
            num_prefix_hits_total=7,
        ),
    ),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=["plain", "full"])
def test_requests_round_trip(request_: EngineCoreRequest) -> None:
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(request_), type=EngineCoreRequest)
    assert copy == request_
    assert type(copy.sampling_params) is SamplingParams
    assert copy.params.stop == request_.params.stop


def test_collections_come_back_as_what_they_were() -> None:
    params = msgspec.msgpack.decode(msgspec.msgpack.encode(REQUESTS[1]), type=EngineCoreRequest).params
    assert params.logit_bias == {50256: -100.0, 7: 1.5}
    assert (params.stop_token_ids, params.allowed_token_ids) == ((9,), (1, 2, 3))
    assert (params.bad_words, params.stop) == (("never",), ("END", "\n"))


@pytest.mark.parametrize("outputs", OUTPUTS, ids=["nothing new", "full"])
def test_outputs_round_trip(outputs: EngineCoreOutputs) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(outputs), type=EngineCoreOutputs) == outputs


def test_a_message_of_another_shape_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="missing required field `priority`"):
        msgspec.msgpack.decode(
            msgspec.msgpack.encode({"request_id": "r", "prompt_token_ids": [1], "sampling_params": {}}),
            type=EngineCoreRequest,
        )


def test_messages_are_frozen() -> None:
    with pytest.raises(AttributeError):
        REQUESTS[0].priority = 1  # type: ignore[misc]


def test_usage_is_a_fraction_of_the_blocks() -> None:
    stats = OUTPUTS[1].stats
    assert stats is not None
    assert stats.kv_cache_usage == 0.25


def test_cache_geometry_in_bytes() -> None:
    """Keys and values, 28 layers of 8 heads of 128 numbers of 2 bytes: Qwen3-0.6B in bf16."""
    layers = tuple(range(28))
    group = KVGroupSpec(group=KVGroup(), layers=layers, parts=(KVPart((8, 128), "bfloat16", 2),) * 2)
    spec = KVCacheSpec(block_size=32, groups=(group,))
    assert (group.bytes_per_block(1), spec.bytes_per_block) == (114_688, (3_670_016,))
    assert spec.num_bytes([3]) == 11_010_048
    assert pickle.loads(pickle.dumps(spec)) == spec
