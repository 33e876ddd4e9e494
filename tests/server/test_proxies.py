"""Real proxies in front, with the configurations in deploy/: streams as they come, prefixes kept or stripped."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import httpx2 as httpx
import pytest
from tests.server.http_server import HttpServer, numbers
from tests.server.proxies import CADDY, NGINX, caddy, nginx

FRONTS = [
    pytest.param(nginx, marks=pytest.mark.skipif(NGINX is None, reason="nginx is not installed"), id="nginx"),
    pytest.param(caddy, marks=pytest.mark.skipif(CADDY is None, reason="Caddy is not installed"), id="caddy"),
]

pytestmark = pytest.mark.full


@pytest.mark.parametrize("front", FRONTS)
def test_streams_are_not_held_back(tmp_path: Path, front: Callable[..., AbstractContextManager[str]]) -> None:
    with HttpServer(has_model=False) as server, front(server, tmp_path) as url:
        body = {"prompt": "Hi", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with (
            httpx.Client(base_url=url, timeout=60) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            pieces = response.iter_bytes()
            first = next(pieces)
            still_running = numbers(server)["octavo_http_requests_in_flight"]
            rest = b"".join(pieces)
        assert first.startswith(b"data: ")
        assert still_running == 2  # the stream, and this question
        assert rest.endswith(b"data: [DONE]\n\n")


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
@pytest.mark.parametrize("location", ["location /llm/ {", "location /llm/ { # stripped"])
def test_a_prefix_may_be_kept_or_stripped(tmp_path: Path, location: str) -> None:
    with HttpServer("--root-path", "/llm", has_model=False) as server, nginx(server, tmp_path, location) as url:
        with httpx.Client(base_url=url, timeout=60) as client:
            assert client.get("/llm/v1/models").json()["data"][0]["id"] == "demo"
            page = client.get("/llm/docs").text
        assert re.search(r"'?/llm/openapi.json", page)


@pytest.mark.parametrize("front", FRONTS)
def test_a_client_that_leaves_ends_its_request(
    tmp_path: Path, front: Callable[..., AbstractContextManager[str]]
) -> None:
    with HttpServer(has_model=False) as server, front(server, tmp_path) as url:
        body = {"prompt": "Hi", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with (
            httpx.Client(base_url=url, timeout=60) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            next(response.iter_bytes())
        while numbers(server)["octavo_client_aborts_total"] < 1:
            pass
