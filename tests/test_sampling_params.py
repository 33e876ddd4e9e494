"""SamplingParams: a value that exists is valid; one that is not says which field, what value, which limit."""

import copy
import pickle
from types import MappingProxyType
from typing import Any

import pytest

from octavo.errors import InvalidParameterError, UnknownOptionError
from octavo.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    RequestPriority,
    SamplingParams,
)

NAN, INFINITY = float("nan"), float("inf")
# Options in pairs of (first value below or above, nearest value that is allowed).
BOUNDS: list[tuple[str, Any, Any]] = [
    ("n", 0, 1),
    ("n", MAX_N + 1, MAX_N),
    ("temperature", -0.1, 0.0),
    ("temperature", 100.1, 100.0),
    ("top_p", 0.0, 1e-9),
    ("top_p", 1.1, 1.0),
    ("top_k", -2, -1),
    ("top_k", 2**31, 2**31 - 1),
    ("min_p", -0.1, 0.0),
    ("min_p", 1.1, 1.0),
    ("presence_penalty", -2.1, -2.0),
    ("presence_penalty", 2.1, 2.0),
    ("frequency_penalty", -2.1, -2.0),
    ("frequency_penalty", 2.1, 2.0),
    ("repetition_penalty", 0.0, 0.001),
    ("repetition_penalty", 100.1, 100.0),
    ("max_tokens", 0, 1),
    ("min_tokens", -1, 0),
    ("seed", -1, 0),
    ("seed", 2**64, 2**64 - 1),
    ("logprobs", -1, 0),
    ("logprobs", MAX_LOGPROBS + 1, MAX_LOGPROBS),
    ("prompt_logprobs", -1, 0),
    ("prompt_logprobs", MAX_LOGPROBS + 1, MAX_LOGPROBS),
    ("logit_bias", {-1: 1.0}, {0: 1.0}),
    ("logit_bias", {7: 100.1}, {7: 100.0}),
    ("logit_bias", {7: -100.1}, {7: -100.0}),
    ("allowed_token_ids", [], [0]),
    ("allowed_token_ids", [-1], [0]),
    ("stop_token_ids", [-1], [0]),
    ("bad_words", [""], [" "]),
    ("stop", [""], [" "]),
    ("stop", ["x"] * (MAX_STOP_STRINGS + 1), ["x"] * MAX_STOP_STRINGS),
    ("stop", ["x" * 4000, "y" * 97], ["x" * 4000, "y" * 96]),
    ("bad_words", ["x"] * (MAX_BAD_WORDS + 1), ["x"] * MAX_BAD_WORDS),
    ("bad_words", ["x" * (MAX_BAD_WORD_CHARACTERS + 1)], ["x" * MAX_BAD_WORD_CHARACTERS]),
    ("bad_words", ["x" * 64] * 1025, ["x" * 64] * 1024),
    ("stop_token_ids", [1] * (MAX_STOP_TOKEN_IDS + 1), [1] * MAX_STOP_TOKEN_IDS),
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 1.0), dict.fromkeys(range(MAX_LOGIT_BIASES), 1.0)),
    ("allowed_token_ids", [1] * (MAX_ALLOWED_TOKEN_IDS + 1), [1] * MAX_ALLOWED_TOKEN_IDS),
]
WRONG_TYPES: list[tuple[str, Any]] = [
    *[(name, value) for name in ("n", "top_k", "min_tokens", "max_tokens", "seed", "logprobs", "prompt_logprobs")
      for value in (1.0, "1", True, [1])],
    *[(name, value) for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
                                 "repetition_penalty")
      for value in ("1", True, None, NAN, INFINITY)],
    *[(name, value) for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
      for value in (1, "yes", None)],
    *[(name, value) for name in ("stop_token_ids", "allowed_token_ids") for value in (5, "5", [True], [1.0], ["5"])],
    *[("bad_words", value) for value in ("word", 5, [5])],
    *[("stop", value) for value in (5, b"x", [5])],
    *[("logit_bias", value) for value in ([1], "x", {"a": 1}, {True: 1}, {1.5: 1}, {None: 1}, {"1": 1, 1: 2})],
    *[("logit_bias", {7: value}) for value in ("1", None, NAN, True)],
]  # fmt: skip


def refusal(name: str, value: Any) -> InvalidParameterError:
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(**{name: value})
    return caught.value


@pytest.mark.parametrize(("name", "refused", "allowed"), BOUNDS, ids=lambda value: repr(value)[:30])
def test_each_limit_is_where_it_is_said_to_be(name: str, refused: Any, allowed: Any) -> None:
    error = refusal(name, refused)
    assert error.field.split("[")[0] == name
    assert str(error).startswith(error.field)
    assert error.limit
    SamplingParams(**{name: allowed})


@pytest.mark.parametrize(("name", "value"), WRONG_TYPES, ids=lambda value: repr(value)[:30])
def test_a_value_of_the_wrong_type_is_refused(name: str, value: Any) -> None:
    assert refusal(name, value).field.split("[")[0] == name


def test_an_error_carries_field_value_and_limit() -> None:
    error = refusal("top_p", 1.5)
    assert (error.field, error.value, error.limit) == ("top_p", 1.5, "between 0 and 1")
    assert str(error) == "top_p=1.5: between 0 and 1"


def test_a_bias_names_its_token() -> None:
    error = refusal("logit_bias", {7: 1.0, 8: 1000})
    assert (error.field, error.value) == ("logit_bias[8]", 1000)


def test_min_tokens_is_at_most_max_tokens() -> None:
    with pytest.raises(InvalidParameterError, match=r"min_tokens=3: at most max_tokens \(2\)"):
        SamplingParams(min_tokens=3, max_tokens=2)
    SamplingParams(min_tokens=3, max_tokens=3)
    SamplingParams(min_tokens=3, max_tokens=None)


def test_defaults_are_those_that_users_know() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens) == (1, 1.0, 1.0, 0, 16)
    assert (params.seed, params.logprobs, params.stop, params.ignore_eos) == (None, None, (), False)


def test_lists_become_tuples_and_one_stop_string_a_tuple_of_one() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[1, 2], bad_words=["x"], allowed_token_ids=range(3))
    assert params.stop == ("END",)
    assert (params.stop_token_ids, params.bad_words, params.allowed_token_ids) == ((1, 2), ("x",), (0, 1, 2))


def test_what_the_caller_changes_afterwards_changes_nothing() -> None:
    stop_token_ids, logit_bias = [1], {5: 1.0}
    params = SamplingParams(stop_token_ids=stop_token_ids, logit_bias=logit_bias)
    stop_token_ids.append(2)
    logit_bias[6] = 1.0
    assert (params.stop_token_ids, params.logit_bias) == ((1,), {5: 1.0})


def test_bias_keys_may_be_spelled_as_json_has_them() -> None:
    bias: Any = MappingProxyType({"50256": -100, "7": 2})
    assert SamplingParams(logit_bias=bias).logit_bias == {50256: -100, 7: 2}


def test_a_misspelt_option_names_the_nearest() -> None:
    with pytest.raises(
        UnknownOptionError, match=r"unknown sampling parameter 'temprature'; did you mean 'temperature'"
    ):
        SamplingParams.from_options({"temprature": 0.5})
    with pytest.raises(UnknownOptionError, match="known: allowed_token_ids, bad_words, "):
        SamplingParams.from_options({"zzz": 0.5})
    assert SamplingParams.from_options({"temperature": 0.5}) == SamplingParams(temperature=0.5)


def test_frozen_and_replaced_with_validation() -> None:
    params = SamplingParams(seed=3)
    with pytest.raises(AttributeError):
        params.seed = 4  # type: ignore[misc]
    assert params.replace(n=2) == SamplingParams(seed=3, n=2)
    with pytest.raises(InvalidParameterError, match="n=0"):
        params.replace(n=0)


def test_greedy_is_temperature_zero() -> None:
    assert [SamplingParams(temperature=value).is_greedy for value in (0, 0.0, 1e-6)] == [True, True, False]


def test_copies_are_equal() -> None:
    params = SamplingParams(logit_bias={1: 2.0}, stop=["a", "b"], seed=2**64 - 1)
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params


def test_five_priorities_the_most_urgent_first() -> None:
    assert [priority.name for priority in sorted(RequestPriority)] == [
        "CRITICAL", "HIGH", "NORMAL", "LOW", "BACKGROUND",
    ]  # fmt: skip
