"""A real nginx in front, with the configuration in deploy/: streams as they come, prefixes kept or stripped."""

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import pytest
from tests.server.http_server import HttpServer, numbers

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
CONF = (Path(__file__).parents[2] / "deploy/nginx.conf").read_text()
SHELL = """daemon off;
error_log stderr;
pid {folder}/pid;
events {{}}
http {{
access_log off;
client_body_temp_path {folder}/body;
proxy_temp_path {folder}/proxy;
fastcgi_temp_path {folder}/fastcgi;
uwsgi_temp_path {folder}/uwsgi;
scgi_temp_path {folder}/scgi;
{conf}
}}
"""

pytestmark = [pytest.mark.full, pytest.mark.skipif(NGINX is None, reason="nginx is not installed")]


@contextmanager
def nginx(server: HttpServer, folder: Path, location: str = "location / {") -> Iterator[str]:
    """Run nginx in front of a server; yield its URL."""
    assert NGINX is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = server.url.removeprefix("http://").partition("/")[0]
    conf = CONF.replace("127.0.0.1:8000", address).replace("listen 80;", f"listen 127.0.0.1:{port};")
    conf = conf.replace("location / {", location)
    if location.endswith("# stripped"):
        conf = conf.replace("proxy_pass http://octavo;", "proxy_pass http://octavo/;")
    (folder / "nginx.conf").write_text(SHELL.format(folder=folder, conf=conf))
    command = [NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf")]
    subprocess.run([*command, "-t"], check=True, capture_output=True)
    with subprocess.Popen(command) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            transport = httpx.HTTPTransport(retries=5)
            with httpx.Client(transport=transport) as client:
                client.get(url)
            yield url
        finally:
            process.terminate()


def test_streams_are_not_held_back(tmp_path: Path) -> None:
    with HttpServer(has_model=False) as server, nginx(server, tmp_path) as url:
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


@pytest.mark.parametrize("location", ["location /llm/ {", "location /llm/ { # stripped"])
def test_a_prefix_may_be_kept_or_stripped(tmp_path: Path, location: str) -> None:
    with HttpServer("--root-path", "/llm", has_model=False) as server, nginx(server, tmp_path, location) as url:
        with httpx.Client(base_url=url, timeout=60) as client:
            assert client.get("/llm/v1/models").json()["data"][0]["id"] == "demo"
            page = client.get("/llm/docs").text
        assert re.search(r"'?/llm/openapi.json", page)


def test_a_client_that_leaves_ends_its_request(tmp_path: Path) -> None:
    with HttpServer(has_model=False) as server, nginx(server, tmp_path) as url:
        body = {"prompt": "Hi", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with (
            httpx.Client(base_url=url, timeout=60) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            next(response.iter_bytes())
        while numbers(server)["octavo_client_aborts_total"] < 1:
            pass
