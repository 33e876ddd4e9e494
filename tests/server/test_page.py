"""The page's files as they are sent: nothing from elsewhere, nothing inline, nothing that reads a text as HTML."""

import hashlib
import re
from pathlib import Path, PurePosixPath

import pytest
from tests.server.http_server import HttpServer
from tests.server.test_auth import real_routes, status_of

from octavo.server.args import ServerArgs
from octavo.server.ui.files import index_page, static_files

OURS = {name: file for name, file in static_files().items() if not name.startswith("vendor/")}
# Ways in which a script makes HTML or code of a text.
READS_TEXT = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc"
)


def test_the_page_is_sent_with_a_strict_policy_and_a_checksum(server: HttpServer) -> None:
    page = server.client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert (policy["script-src"], policy["style-src"], policy["connect-src"]) == ("'self'",) * 3
    assert page.headers["x-content-type-options"] == "nosniff"
    same = server.client.get("/", headers={"if-none-match": f'"other", W/{page.headers["etag"]}'})
    assert (same.status_code, same.content) == (304, b"")
    assert server.client.get("/", headers={"if-none-match": '"other"'}).status_code == 200


def test_all_that_the_page_names_is_here_and_its_links_lead_somewhere(server: HttpServer) -> None:
    page = server.client.get("/").text
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\son\w+=|https?://", page)
    names = re.findall(r'(?:src|href)="(?!\./")([^"]*)"', page)
    assert {"ui/main.js", "docs", "v1/models", "health", "metrics"} <= set(names)
    for name in names:
        assert not name.startswith("/"), "behind a proxy's prefix an address is relative"
        assert server.client.get(f"/{name}").status_code == 200, name


@pytest.mark.parametrize("name", sorted(OURS))
def test_scripts_insert_text_as_text_and_import_what_there_is(name: str) -> None:
    text = OURS[name].content.decode()
    assert not READS_TEXT.search(text)
    if name.endswith(".js"):
        for found in re.findall(r'from "([^"]*)"', text):
            assert str(PurePosixPath(name).parent / found) in static_files()
    if name.endswith(".css"):
        assert "url(" not in text
        assert "@import" not in text


def test_what_is_vendored_is_what_was_published() -> None:
    import octavo.server.ui as package

    folder = Path(package.__file__).parent / "static/vendor"
    listed = dict(re.findall(r"\| `([\w.]+)` \|.*`([0-9a-f]{64})` \|", (folder / "README.md").read_text()))
    assert set(listed) == {path.name for path in folder.glob("*.js")}
    for name, digest in listed.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
        assert (folder / name.replace(".esm.js", ".LICENSE.md")).is_file()


async def test_no_ui_removes_it() -> None:
    app, routes = real_routes(ServerArgs(ui=False))
    assert not any(path == "/" or path.startswith("/ui") for _, path in routes)
    for path in ("/", "/ui/main.js", "/ui/about"):
        assert await status_of(app, "GET", path, (b"x-api-key", b"secret")) == 404


def test_behind_a_prefix_addresses_begin_with_it() -> None:
    assert b'<base href="/llm/">' in index_page("/llm").content
    assert b'<base href="./">' in index_page("").content
    assert b'<base href="/&quot;&gt;/">' in index_page('/">').content


def test_it_is_told_of_the_model_its_defaults_and_the_settings(server: HttpServer) -> None:
    about = server.client.get("/ui/about").json()
    assert about["models"] == [card["id"] for card in server.client.get("/v1/models").json()["data"]]
    assert about["defaults"]["temperature"] >= 0
    assert about["takes_images"] is False
    settings = {each["name"]: each for each in about["settings"]}
    assert settings["port"] == {"name": "port", "value": 0, "origin": "--port"}
    assert settings["max_waiting"]["origin"] == "default"
    assert "api_key" not in settings


def test_an_unknown_file_is_404(server: HttpServer) -> None:
    for name in ("none.js", "vendor/README.md", "../routes.py", "..%2froutes.py"):
        assert server.client.get(f"/ui/{name}").status_code == 404
