"""Errors: two families, messages with the numbers, and the same after a trip between processes."""

import pickle
from inspect import getmembers, isclass

import pytest

from octavo import errors
from octavo.errors import (
    EngineDeadError,
    EngineError,
    InvalidParameterError,
    OctavoError,
    OutOfBlocksError,
    PromptTooLongError,
    UnknownOptionError,
    UserError,
    nearest_hint,
)

ALL = [kind for _, kind in getmembers(errors, isclass) if issubclass(kind, OctavoError)]
INSTANCES = [
    InvalidParameterError("top_p", 2.0, "between 0 and 1"),
    PromptTooLongError("prompt", 5000, "at most 4096 tokens"),
    UnknownOptionError("engine option", "blok_size", ["block_size", "seed"]),
    OutOfBlocksError(4, 3),
    EngineDeadError("killed by signal 9"),
]


def test_every_error_is_the_users_or_the_engines() -> None:
    assert len(ALL) > 10
    for kind in ALL:
        assert kind is OctavoError or issubclass(kind, UserError) != issubclass(kind, EngineError), kind


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_says_what_it_is_for(kind: type[OctavoError]) -> None:
    assert kind.__doc__


@pytest.mark.parametrize("error", INSTANCES, ids=lambda error: type(error).__name__)
def test_errors_cross_processes_whole(error: OctavoError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), vars(copy)) == (str(error), vars(error))


def test_errors_are_what_python_programs_expect() -> None:
    assert isinstance(INSTANCES[0], ValueError)
    assert isinstance(INSTANCES[2], TypeError)


def test_messages_name_field_value_and_limit() -> None:
    assert [str(error) for error in INSTANCES] == [
        "top_p=2.0: between 0 and 1",
        "prompt=5000: at most 4096 tokens",
        "unknown engine option 'blok_size'; did you mean 'block_size'?",
        "4 KV blocks requested, 3 free",
        "killed by signal 9",
    ]


def test_without_a_close_name_all_are_listed() -> None:
    assert nearest_hint("zzz", ["alpha", "beta"]) == "known: alpha, beta"
