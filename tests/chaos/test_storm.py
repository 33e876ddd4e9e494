"""A short storm; `make chaos` runs the long one."""

import pytest
from tests.chaos.storm import KINDS, run


def test_streams_of_every_kind_outlive_kills() -> None:
    report = run([], model="demo", requests=2 * len(KINDS), every=(4.0, 6.0))
    assert report.differing == {}
    assert sum(report.kills.values()) > 0
    assert report.num_left == 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ("demo", ["--tensor-parallel-size", "2"]),
        ("demo", ["--data-parallel-size", "2"]),
        ("demo", ["--speculative-config", '{"method": "ngram"}']),
        ("demo-vl", ["--hot-standby"]),
    ],
    ids=["ranks", "replicas", "drafts", "images and a standby"],
)
def test_streams_outlive_kills_of_any_process(model: str, flags: list[str]) -> None:
    report = run(flags, model=model, requests=60, every=(5.0, 8.0))
    assert report.differing == {}
    assert sum(report.kills.values()) > 0
    assert report.num_left == 0
