"""Compiling elsewhere: nobody waits for it, each form once, over the time limit is an error; ends that are none."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.structured.support import allowed_ids, backend_of, end_id, tokenizer_of

from octavo.contracts.engine import EngineCoreRequest
from octavo.errors import (
    GrammarError,
    GrammarTooComplexError,
    InvalidParameterError,
    OctavoError,
    RequestError,
    UserError,
)
from octavo.structured.llguidance_backend import LLGuidanceBackend, LLGuidanceMatcher
from octavo.structured.manager import MAX_CACHED, GrammarManager
from octavo.structured_output import StructuredOutput
from octavo.testing import make_request

DIGITS = StructuredOutput(regex="[0-9]{2,4}")
Compile = Callable[[StructuredOutput], LLGuidanceMatcher]


class WatchedBackend(LLGuidanceBackend):
    """The demo model's, with a compiler that a test may replace."""

    def __init__(self, compile_constraint: Compile) -> None:
        made = backend_of("demo")
        self.__dict__.update(made.__dict__)
        self._compile_constraint = compile_constraint
        self.num_compiled = 0

    def compile(self, constraint: StructuredOutput) -> LLGuidanceMatcher:
        self.num_compiled += 1
        return self._compile_constraint(constraint)


@contextmanager
def manager_of(backend: LLGuidanceBackend, time_limit_s: float = 60.0) -> Iterator[GrammarManager]:
    manager = GrammarManager(lambda: backend, time_limit_s=time_limit_s)
    yield manager
    manager.close()


def request(name: str, constraint: StructuredOutput = DIGITS, **options: Any) -> EngineCoreRequest:
    return make_request(
        name, [1], eos_token_ids=[end_id("demo")], structured_output=constraint, max_tokens=20, **options
    )


def wait_for(manager: GrammarManager, count: int = 1) -> dict[str, OctavoError | None]:
    """Return what has been compiled, once there are `count` of them."""
    done: dict[str, OctavoError | None] = {}
    while len(done) < count:
        manager.wait(10.0)
        done |= manager.take_compiled()
    return done


def token(text: str) -> int:
    [token_id] = tokenizer_of("demo")[0].encode(text)
    return token_id


def test_an_answer_step_by_step() -> None:
    with manager_of(backend_of("demo")) as manager:
        manager.begin(request("a"))
        assert wait_for(manager) == {"a": None}
        assert end_id("demo") not in allowed_ids(manager.masks(["a"])[0])
        assert not manager.advance({"a": [token("4")]})
        manager.advance({"a": [token("2")]})
        assert end_id("demo") in allowed_ids(manager.masks(["a"])[0])
        manager.advance({"a": [token("4")]})
        assert manager.advance({"a": [token("2")]}) == {"a": None}


def test_masks_along_drafts_are_those_of_an_answer_that_says_them() -> None:
    with manager_of(backend_of("demo")) as manager:
        for name in "ab":
            manager.begin(request(name))
        wait_for(manager, 2)
        drafts = [token(letter) for letter in "4242"]
        masks = manager.masks_along("a", drafts)
        assert len(masks) == 4  # behind the last draft nothing may follow
        for mask, draft in zip(masks, drafts, strict=True):
            assert manager.masks(["b"])[0].tolist() == mask.tolist()
            manager.advance({"b": [draft]})
        assert manager.masks(["a"])[0].tolist() == masks[0].tolist()
        assert len(manager.masks_along("a", [token("4"), token("x"), token("4")])) == 2
        assert manager.advance({"a": drafts}) == {"a": None}


def test_one_that_may_not_go_on_leaves_the_others_alone() -> None:
    with manager_of(backend_of("demo")) as manager:
        for name in "abc":
            manager.begin(request(name))
        wait_for(manager, 3)
        ends = manager.advance({"a": [token("1")], "b": [token("x")], "c": [token("3")]})
        assert {name: type(error) for name, error in ends.items()} == {"b": GrammarError}
        assert manager.masks(["a", "c"]).shape == (2, backend_of("demo").num_words)


def test_who_ignores_the_end_is_not_offered_it() -> None:
    with manager_of(backend_of("demo")) as manager:
        manager.begin(request("a", StructuredOutput(regex="[0-9]*"), ignore_eos=True))
        manager.begin(request("b", StructuredOutput(regex="[0-9]*")))
        wait_for(manager, 2)
        without, with_end = (set(allowed_ids(mask)) for mask in manager.masks(["a", "b"]))
        assert with_end - without == {end_id("demo")}
        assert not without - with_end


def test_nobody_waits_while_a_form_is_compiled() -> None:
    go_on = threading.Event()

    def slow(constraint: StructuredOutput) -> LLGuidanceMatcher:
        if constraint != DIGITS:
            assert go_on.wait(30)
        return backend_of("demo").compile(constraint)

    with manager_of(WatchedBackend(slow)) as manager:
        manager.begin(request("slow", StructuredOutput(regex="x")))
        manager.begin(request("quick"))
        assert wait_for(manager) == {"quick": None}
        assert manager.take_compiled() == {}
        go_on.set()
        assert wait_for(manager) == {"slow": None}


def test_a_form_is_compiled_once_while_it_is_remembered() -> None:
    backend = WatchedBackend(backend_of("demo").compile)
    with manager_of(backend) as manager:
        for index in range(3):
            manager.begin(request(f"a{index}"))
        wait_for(manager, 3)
        assert backend.num_compiled == 1
        for index in range(MAX_CACHED):
            manager.begin(request(f"b{index}", StructuredOutput(choice=[str(index)])))
        wait_for(manager, MAX_CACHED)
        manager.begin(request("c"))
        assert wait_for(manager) == {"c": None}
        assert backend.num_compiled == MAX_CACHED + 2


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidParameterError("a", "b", "c"), UserError),
        (GrammarTooComplexError("too much"), GrammarTooComplexError),
        (RuntimeError("a bug"), RequestError),
        (ValueError("a refusal"), UserError),
        (SystemExit("a panic"), UserError),
    ],
)
def test_what_compiling_raises_belongs_to_the_request(error: BaseException, kind: type[OctavoError]) -> None:
    def broken(constraint: StructuredOutput) -> LLGuidanceMatcher:
        raise error

    with manager_of(WatchedBackend(broken)) as manager:
        manager.begin(request("a"))
        assert type(wait_for(manager)["a"]) is kind


def test_a_backend_that_cannot_be_made_fails_every_request() -> None:
    def make() -> LLGuidanceBackend:
        raise InvalidParameterError("tokenizer", "x", "unreadable")

    manager = GrammarManager(make)
    for name in "ab":
        manager.begin(request(name))
    assert {type(error) for error in wait_for(manager, 2).values()} == {UserError}
    manager.close()


def test_over_the_time_limit() -> None:
    go_on = threading.Event()

    def stuck(constraint: StructuredOutput) -> LLGuidanceMatcher:
        assert go_on.wait(30)
        return backend_of("demo").compile(constraint)

    with manager_of(WatchedBackend(stuck), time_limit_s=0.0) as manager:
        manager.begin(request("a"))
        done: dict[str, OctavoError | None] = {}
        while not done:  # until the thread has begun
            done = manager.take_compiled()
        assert isinstance(done["a"], GrammarTooComplexError)
        go_on.set()


def test_who_has_left_is_forgotten() -> None:
    with manager_of(backend_of("demo")) as manager:
        manager.begin(request("a"))
        manager.forget("a")
        manager.forget("never heard of")
        manager.begin(request("b"))
        assert wait_for(manager) == {"b": None}
