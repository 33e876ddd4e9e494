"""The collector of cycles rests while things are loaded, and only then."""

import gc
from collections.abc import Iterator

import pytest

from octavo.device.process import without_garbage_collection


@pytest.fixture(autouse=True)
def _enabled_again() -> Iterator[None]:
    yield
    gc.enable()


def load(fails: bool) -> None:
    with without_garbage_collection():
        assert not gc.isenabled()
        if fails:
            raise OSError("no such model")


def test_the_collector_is_back_after_a_failure() -> None:
    with pytest.raises(OSError, match="no such model"):
        load(fails=True)
    assert gc.isenabled()


def test_who_has_switched_it_off_finds_it_off() -> None:
    gc.disable()
    load(fails=False)
    assert not gc.isenabled()
