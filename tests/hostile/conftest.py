"""One server that everybody here mistreats. What it wrote and what it still holds is looked at when all is over."""

from collections.abc import Iterator

import pytest
from tests.hostile.vitals import Vitals
from tests.server.http_server import HttpServer

READ_TIMEOUT_S = 2
MAX_BODY_BYTES = 1_000_000


@pytest.fixture(scope="package")
def server() -> Iterator[HttpServer]:
    flags = ("--read-timeout-s", str(READ_TIMEOUT_S), "--max-body-bytes", str(MAX_BODY_BYTES), "--max-num-seqs", "64")
    with HttpServer(*flags, "--max-waiting", "4096", starts_python=True) as running:
        yield running
        assert "Traceback" not in running.log


@pytest.fixture(autouse=True)
def _unharmed(server: HttpServer) -> Iterator[None]:
    """After every test the server is well and holds nothing for anyone."""
    before = Vitals.of(server)
    yield
    before.wait_until_restored(server)
