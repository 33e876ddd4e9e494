"""One server with the demo model for all tests that do not harm it. It ends with the last of them."""

from collections.abc import Iterator
from dataclasses import dataclass

import httpx2 as httpx
import pytest
from tests.server.http_server import HttpServer


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The server, and what it said while it was loading the model."""

    server: HttpServer
    health: httpx.Response
    reply: httpx.Response


@pytest.fixture(scope="package")
def start() -> Iterator[Start]:
    loading = HttpServer(starts_python=True)
    health = loading.client.get("/health")
    reply = loading.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
    with loading as running:
        yield Start(server=running, health=health, reply=reply)


@pytest.fixture(scope="package")
def server(start: Start) -> HttpServer:
    return start.server
