"""Octavo's own reading of configurations: what it refuses, nobody else is asked about."""

import pytest

from octavo.config import hf


@pytest.fixture(autouse=True)
def _octavo_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "may_be_known", lambda fields: False)
