"""Waiting threads sleep before long, unless the user said otherwise."""

import os
import sys
import types

import pytest

from octavo.device.process import limit_spinning

SETTINGS = ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.setenv(name, "")  # so that it is restored afterwards
        monkeypatch.delenv(name)


def test_sleeping_is_asked_for() -> None:
    limit_spinning()
    assert int(os.environ["GOMP_SPINCOUNT"]) > 0
    assert int(os.environ["KMP_BLOCKTIME"]) > 0


@pytest.mark.parametrize("name", SETTINGS)
def test_what_the_user_set_stands(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "7")
    before = dict(os.environ)
    limit_spinning()
    assert dict(os.environ) == before


def test_it_says_whether_it_came_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert not limit_spinning()
    monkeypatch.delitem(sys.modules, "torch")
    assert limit_spinning()
