"""Percentiles, and the two ways to print figures."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.cli.terminal import percentile, print_reports, spread


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), rank=st.sampled_from([0, 50, 90, 99, 100]))
def test_percentiles_are_numpys(values: list[float], rank: int) -> None:
    assert percentile(values, rank) == pytest.approx(float(np.percentile(values, rank)), abs=1e-6)


def test_spread_of_nothing_is_nothing() -> None:
    assert spread("x_ms", []) == {}
    assert spread("x_ms", [1.0, 3.0]) == {
        "x_ms_mean": 2.0, "x_ms_p50": 2.0, "x_ms_p90": pytest.approx(2.8), "x_ms_p99": pytest.approx(2.98)
    }  # fmt: skip


def test_json_is_one_object_per_report(capsys: pytest.CaptureFixture[str]) -> None:
    print_reports([{"a": 1}, {"a": 2.5}], as_json=True)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [{"a": 1}, {"a": 2.5}]


def test_the_table_is_plain_when_piped(capsys: pytest.CaptureFixture[str]) -> None:
    print_reports([{"a": 1, "b": 12345.6}, {"a": 2}], as_json=False)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [["a", "1", "2"], ["b", "12346", "-"]]
