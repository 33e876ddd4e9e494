"""The process in which forms are tried: it dies of a bomb and comes back, tries good forms once, is never left over."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from tests.breadth import pick

from octavo.errors import GrammarTooComplexError, InvalidParameterError, RequestError
from octavo.structured.checker import MAX_REMEMBERED, StructuredOutputChecker
from octavo.structured_output import StructuredOutput

GOOD = StructuredOutput(json_schema={"type": "integer"})
BAD = StructuredOutput(json_schema={"properties": {"a": {"type": "strnig"}}})
# A minute of work for the library, and nothing that its own limits see.
SLOW = StructuredOutput(json_schema={"patternProperties": {f"^a{i}[a-z]*$": {} for i in range(1000)}})
WIDE = StructuredOutput(json_schema={"properties": {f"p{i}": {"type": "integer"} for i in range(15_000)}})
BOMBS = {"slow": SLOW, "wide": WIDE}


@pytest.fixture(scope="module")
def checker() -> Iterator[StructuredOutputChecker]:
    """One for all: its process takes half a second to start."""
    made = StructuredOutputChecker()
    yield made
    made.close()
    assert not trials()


def trials() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "octavo.structured.checker" in child.cmdline()]


def test_a_fault_comes_back_as_it_was_found(checker: StructuredOutputChecker) -> None:
    checker.check(GOOD)
    with pytest.raises(InvalidParameterError, match="Invalid type: strnig") as caught:
        checker.check(BAD)
    assert caught.value.field == "structured_output.json_schema"
    assert caught.value.limit.startswith("at $.properties.a:")
    checker.check(StructuredOutput(choice=["it", "goes", "on"]))
    assert len(trials()) == 1


@pytest.mark.parametrize("name", pick(["slow"], [*BOMBS]))  # each takes all of its 1.5 s
def test_a_bomb_ends_the_process_and_nothing_else(checker: StructuredOutputChecker, name: str) -> None:
    with pytest.raises(GrammarTooComplexError, match="json_schema: compilation takes too much time or memory"):
        checker.check(BOMBS[name])
    assert not trials()
    checker.check(StructuredOutput(choice=[f"after {name}"]))  # not one that it remembers
    assert len(trials()) == 1


def test_a_good_form_is_tried_once_while_it_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = StructuredOutputChecker()
    tried: list[StructuredOutput] = []
    monkeypatch.setattr(StructuredOutputChecker, "_try", lambda self, constraint: tried.append(constraint))
    checker.check(GOOD)
    checker.check(StructuredOutput(json_schema='{"type": "integer"}'))
    assert tried == [GOOD]
    for index in range(MAX_REMEMBERED):
        checker.check(StructuredOutput(choice=[str(index)]))
    checker.check(GOOD)
    assert tried.count(GOOD) == 2


def test_a_bad_form_is_bad_every_time(checker: StructuredOutputChecker) -> None:
    for _ in range(2):
        with pytest.raises(InvalidParameterError):
            checker.check(BAD)


def test_many_threads_ask_at_once(checker: StructuredOutputChecker) -> None:
    constraints = [StructuredOutput(regex=f"a{{{count}}}") for count in range(1, 30)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(checker.check, constraints))
    assert len(trials()) == 1


def test_a_process_that_cannot_run_is_our_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    checker = StructuredOutputChecker()
    with pytest.raises(RequestError, match="exited with 1"):
        checker.check(GOOD)
    checker.close()


def test_a_process_that_somebody_killed_is_replaced(checker: StructuredOutputChecker) -> None:
    checker.check(StructuredOutput(regex="before"))
    [process] = trials()
    process.kill()
    process.wait()
    checker.check(StructuredOutput(regex="c"))
    assert len(trials()) == 1


def test_it_may_be_closed_at_any_time() -> None:
    checker = StructuredOutputChecker()
    checker.close()
    checker.check(GOOD)
    checker.close()
    checker.close()
    checker.check(StructuredOutput(regex="b"))
    checker.close()


def test_one_that_is_killed_from_outside_is_asked_again(checker: StructuredOutputChecker) -> None:
    checker.check(StructuredOutput(choice=["a"]))
    assert checker._process is not None
    pid = checker._process.pid
    os.kill(pid, signal.SIGSTOP)
    killer = threading.Timer(0.2, os.kill, (pid, signal.SIGKILL))
    killer.start()
    checker.check(StructuredOutput(choice=["b"]))
    killer.join()
