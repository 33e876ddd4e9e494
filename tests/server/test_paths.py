"""The paths that clients and proxies make of a route, and what they are told about others."""

import httpx2 as httpx
import pytest
from starlette.types import ASGIApp

from octavo.config.args import EngineArgs
from octavo.metrics.collect import HttpMetrics
from octavo.server.app import create_app, with_middleware
from octavo.server.args import ServerArgs
from octavo.server.http.exchange import route_of
from octavo.server.lifecycle import EngineLifecycle
from octavo.server.policy import Admission

JSON = {"content-type": "application/json"}


def real_app(args: ServerArgs) -> ASGIApp:
    """The whole application; its engine is never loaded."""
    app = create_app(EngineLifecycle(EngineArgs(), args), args, HttpMetrics())
    return with_middleware(app, args, (), Admission(1, 1), HttpMetrics())


def client_of(app: ASGIApp) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test")


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/", "/"),
        ("/llm", "/"),
        ("/llm/", "/"),
        ("/health", "/health"),
        ("/llm/health/", "/health"),
        ("//llm//v1///chat//completions/", "/v1/chat/completions"),
        ("/llmx/health", "/llmx/health"),  # another name, not the prefix
        ("/llm/llm/health", "/llm/health"),  # the prefix is stripped once
        ("/chat/completions", "/v1/chat/completions"),
        ("/llm/completions", "/v1/completions"),
        ("/models", "/v1/models"),
        ("/v1/models/", "/v1/models"),
        ("/v1//models//", "/v1/models"),
        ("/models/demo", "/v1/models/demo"),
        ("/v1/models//data//llm/demo/", "/v1/models//data//llm/demo/"),  # a model's name is not touched
    ],
)
def test_the_route_that_a_path_means(path: str, route: str) -> None:
    assert route_of(path, "/llm") == route


def test_every_route_below_v1_is_served_without_it() -> None:
    served = create_app(EngineLifecycle(EngineArgs(), ServerArgs()), ServerArgs(), HttpMetrics()).openapi()["paths"]
    versioned = [path for path in served if path.startswith("/v1/")]
    assert "/v1/embeddings" in versioned
    for path in versioned:
        short = path.removeprefix("/v1")
        assert route_of(short, "") == (short if short in served else path)  # /rerank is a route of its own


@pytest.mark.parametrize("prefix", ["", "/llm"])
async def test_both_forms_of_a_prefixed_path_are_served(prefix: str) -> None:
    app = real_app(ServerArgs(root_path="/llm"))
    async with client_of(app) as client:
        for path, status in {"/version": 200, "/health": 503, "/v1/models/": 503, "/docs": 200, "/": 200}.items():
            assert (await client.get(prefix + path)).status_code == status, path
        assert "/llm/openapi.json" in (await client.get(prefix + "/docs")).text
        page = (await client.get(prefix + "/openapi.json")).json()
        assert page["servers"] == [{"url": "/llm"}]
        assert (await client.post(prefix + "/chat/completions", content=b"{}")).status_code != 404
        assert (await client.get(f"/llmx{prefix}/version")).status_code == 404


async def test_head_is_get_without_a_body() -> None:
    async with client_of(real_app(ServerArgs())) as client:
        for path in ("/health", "/ready", "/ping", "/v1/models", "/v1/models/demo", "/version", "/", "/docs"):
            head, get = await client.head(path), await client.get(path)
            assert head.status_code == get.status_code != 405, path
            assert head.headers["content-length"] == get.headers["content-length"]
        refused = await client.put("/ping")
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD, POST")


@pytest.mark.parametrize("path", ["/v1/v1/chat/completions", "/api/v1/chat/completions", "/openai/chat/completions"])
async def test_a_wrong_base_url_is_told_the_way(path: str) -> None:
    async with client_of(real_app(ServerArgs())) as client:
        refused = await client.post(path, content=b"{}", headers=JSON)
        assert refused.status_code == 404
        assert "/v1/chat/completions" in refused.json()["error"]["message"]


async def test_what_needs_a_folder_says_so() -> None:
    async with client_of(real_app(ServerArgs())) as client:
        for path in ("/v1/files", "/v1/batches/x"):
            response = await client.post(path, json={})
            assert response.status_code == 404
            assert "octavo serve --state-dir DIR" in response.json()["error"]["message"]
