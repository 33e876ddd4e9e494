"""A short storm; `make chaos` runs the long one."""

import pytest
from tests.chaos.storm import KINDS, run


@pytest.mark.full  # by default tests/engine/test_outliving.py and tests/server/test_several_models.py kill fake cores
def test_streams_of_every_kind_outlive_kills() -> None:
    report = run([], model="demo", requests=len(KINDS), every=(0.1, 0.1), seed=2, most=1, max_tokens=60)
    assert report.differing == {}
    assert report.num_core_deaths == 1  # with this seed the victim is the core, not what checks constraints
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
    report = run(flags, model=model, requests=80, every=(1.0, 2.5), most=4)
    assert report.differing == {}
    assert sum(report.kills.values()) > 0
    assert report.num_left == 0
