"""A short storm of kills of the whole server; `make chaos` runs the long one."""

import pytest
from tests.chaos.front_storm import run
from tests.chaos.storm import KINDS


@pytest.mark.full
def test_clients_of_every_kind_get_the_rest_from_the_next_server() -> None:
    report = run(requests=len(KINDS), every=(1.0, 2.0), most=1)
    assert report.differing == {}
    assert report.num_kills == 1
    assert report.num_returns > 0
