"""Without a key there is nothing but /health and /ready."""

from pathlib import Path

import pytest
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope, Send
from tests.server.tiny import tiny_server

from octavo.config.args import EngineArgs
from octavo.errors import InvalidParameterError
from octavo.metrics.collect import HttpMetrics
from octavo.server.app import create_app, with_middleware
from octavo.server.args import ServerArgs
from octavo.server.lifecycle import EngineLifecycle
from octavo.server.listen import load_api_keys
from octavo.server.policy import Admission, key_of
from octavo.server.ui.files import static_files

OPEN = {"/health", "/ready", "/ping"}
OPEN |= {"/", "/docs", "/docs/swagger-ui.css", "/openapi.json"}  # for browsers, which send no key; nothing of the model
# written out once more: widening it should take two edits
PAGE = {f"/ui/{name}" for name in static_files()}


async def status_of(app: object, method: str, path: str, *headers: tuple[bytes, bytes]) -> int:
    """Call an ASGI application without a server around it; return the status."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}", "more_body": False} if not sent else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "headers": list(headers), "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
        "scheme": "http", "http_version": "1.1", "asgi": {"version": "3.0"}, "state": {},
    }  # fmt: skip
    await app(scope, receive, send)  # type: ignore[operator]
    status: int = sent[0]["status"]
    return status


def real_routes(args: ServerArgs) -> tuple[object, list[tuple[str, str]]]:
    """Return the guarded application, and every (method, path) that its router knows."""
    app = create_app(EngineLifecycle(EngineArgs(), args), args, HttpMetrics())
    found = [pair for route in app.routes for pair in methods_and_paths(route)]
    return with_middleware(app, args, ("secret",), Admission(1, 1), HttpMetrics()), found


def methods_and_paths(route: BaseRoute) -> list[tuple[str, str]]:
    assert isinstance(route, Route), f"{route} is of a kind that this test does not know how to call"
    return [
        (method, route.path.replace("{name:path}", "demo").replace("{name}", "swagger-ui.css"))
        for method in sorted(route.methods or ())
    ]


async def test_every_route_needs_a_key_except_those_written_down(tmp_path: Path) -> None:
    app, routes = real_routes(ServerArgs(state_dir=str(tmp_path)))
    assert {("DELETE", "/v1/files/{file_id}"), ("POST", "/v1/batches")} <= {*routes}
    assert ("POST", "/v1/chat/completions") in routes
    assert {path for _, path in routes} > OPEN
    for method, path in routes:
        without = await status_of(app, method, path)
        assert (without != 401) == (path in OPEN), (method, path)
        assert await status_of(app, method, path, (b"x-api-key", b"wrong")) == (without if path in OPEN else 401)
        assert await status_of(app, method, path, (b"x-api-key", b"secret")) != 401


async def test_the_page_is_open_and_what_it_shows_is_not() -> None:
    app, _ = real_routes(ServerArgs())
    for path in PAGE:
        assert path.endswith((".html", ".js", ".css", ".svg"))
        assert await status_of(app, "GET", path) == 200
    for path in ("/ui/about", "/ui/engine", "/ui/none.js", "/ui/"):
        assert await status_of(app, "GET", path) == 401


@pytest.mark.parametrize(
    "path", ["/nowhere", "/health/x", "/healthy", "/health/../v1/models", "/HEALTH", "/v1/health", "/llm/health"]
)
async def test_what_only_looks_like_an_open_path_needs_a_key(path: str) -> None:
    app, _ = real_routes(ServerArgs())
    assert await status_of(app, "GET", path) == 401


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [
        (b"authorization", b"Bearer k", b"k"),
        (b"authorization", b"bearer  k ", b"k"),
        (b"authorization", b"Basic k", None),
        (b"authorization", b"Bearer ", None),
        (b"x-api-key", b" k ", b"k"),
        (b"x-api-key", b"", None),
    ],
)
def test_where_a_key_is_found(name: bytes, value: bytes, key: bytes | None) -> None:
    assert key_of([(b"host", b"h"), (name, value)]) == key


async def test_each_of_several_keys_opens_and_a_wrong_one_is_told(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# team a\nfrom-file\n\n  padded  \n")
    async with tiny_server(api_key=("given",), api_key_file=str(file)) as tiny:
        for key in ("given", "from-file", "padded"):
            assert (await tiny.client.get("/x", headers={"Authorization": f"Bearer {key}"})).status_code == 200
            assert (await tiny.client.get("/x", headers={"x-api-key": key})).status_code == 200
        refused = await tiny.client.get("/x", headers={"x-api-key": "give"})
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        error = refused.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert (await tiny.client.get("/x")).json()["error"]["code"] == "missing_api_key"
        assert tiny.metrics.rejections == {"invalid_api_key": 1, "missing_api_key": 1}


async def test_behind_a_prefix_the_same_paths_are_open() -> None:
    async with tiny_server(api_key=("k",), root_path="/llm") as tiny:
        url = f"http://127.0.0.1:{tiny.port}"
        for path in ("/health", "/llm/health", "/llm/ping/", "//llm//ready"):
            assert (await tiny.client.get(url + path)).status_code == 200, path
        for path in ("/x", "/llm/x", "/llmx/health", "/llm/llm/health", "/llmhealth"):
            assert (await tiny.client.get(url + path)).status_code == 401, path


@pytest.mark.parametrize("text", ["", "# nothing\n\n", "ключ\n"])
def test_a_key_file_without_a_key_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(InvalidParameterError, match="api_key_file"):
        load_api_keys(ServerArgs(api_key_file=str(tmp_path / "keys")))
    with pytest.raises(InvalidParameterError, match="cannot be read"):
        load_api_keys(ServerArgs(api_key_file=str(tmp_path / "none")))


async def test_asgi_types_are_what_the_helpers_say() -> None:
    """The helper above calls applications by hand; this holds it to what a real server does."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "http.request"
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        assert (await receive())["type"] == "http.disconnect"

    assert await status_of(app, "GET", "/") == 204
