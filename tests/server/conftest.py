"""One server with the demo model for all tests that do not harm it."""

from collections.abc import Iterator

import pytest
from tests.server.http_server import HttpServer


@pytest.fixture(scope="session")
def server() -> Iterator[HttpServer]:
    with HttpServer() as running:
        yield running
