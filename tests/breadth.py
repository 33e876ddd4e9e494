"""How much a run tries: what guards every promise once (`make test`), or all there is (`make test-all`).

`TEST_BREADTH=all` adds kernel levels between the best and the portable one, sizes between borders, more seeds and more
random examples to the same test functions, and runs those that are marked `full`.
The variable is not called OCTAVO_...: servers that tests start refuse variables of that kind that they do not know.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
Test = Callable[..., None]

RUNS_ALL = os.environ.get("TEST_BREADTH") == "all"


def pick(usual: T, full: T) -> T:
    """Return `usual` in `make test`, `full` in `make test-all`."""
    return full if RUNS_ALL else usual


def each(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Test], Test]:
    """Loop over values inside one test, where `pytest.mark.parametrize` would make a test of each.

    For sizes and other scalars: setting up a test costs more than many of these take. The values share the test's
    fixtures, the first that fails ends the test, and a note on the failure says which it was.
    """
    names, values = (names,) if isinstance(names, str) else names, list(values)

    def decorate(test: Test) -> Test:
        assert not inspect.iscoroutinefunction(test), f"{test.__name__}: `each` awaits nothing"
        signature = inspect.signature(test)
        assert {*names} <= {*signature.parameters}, f"{test.__name__} does not take {names}"

        @functools.wraps(test)
        def loop(**fixtures: Any) -> None:
            for value in values:
                chosen = dict(zip(names, (value,) if len(names) == 1 else value, strict=True))
                try:
                    test(**fixtures, **chosen)
                except Exception as error:
                    error.add_note("with " + ", ".join(f"{name}={_name(chosen[name])}" for name in names))
                    raise

        kept = [parameter for name, parameter in signature.parameters.items() if name not in names]
        loop.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]  # read by pytest
        return loop

    return decorate


def _name(value: object) -> str:
    """Return what a value is called: cases have names, and functions."""
    return str(getattr(value, "name", None) or getattr(value, "__name__", None) or value)
