"""Proxies in front of a server, with the configurations in deploy/."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
from tests.server.http_server import HttpServer

DEPLOY = Path(__file__).parents[2] / "deploy"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
CADDY = shutil.which("caddy")
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


@contextmanager
def nginx(server: HttpServer, folder: Path, location: str = "location / {") -> Iterator[str]:
    """Run nginx in front of a server; yield its URL."""
    assert NGINX is not None
    port = free_port()
    conf = (DEPLOY / "nginx.conf").read_text().replace("127.0.0.1:8000", address_of(server))
    conf = conf.replace("listen 80;", f"listen 127.0.0.1:{port};").replace("location / {", location)
    if location.endswith("# stripped"):
        conf = conf.replace("proxy_pass http://octavo;", "proxy_pass http://octavo/;")
    (folder / "nginx.conf").write_text(SHELL.format(folder=folder, conf=conf))
    command = [NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf")]
    subprocess.run([*command, "-t"], check=True, capture_output=True)
    with running(command, port) as url:
        yield url


@contextmanager
def caddy(server: HttpServer, folder: Path) -> Iterator[str]:
    """Run Caddy in front of a server; yield its URL."""
    assert CADDY is not None
    port = free_port()
    conf = (DEPLOY / "Caddyfile").read_text().replace("127.0.0.1:8000", address_of(server))
    conf = conf.replace(":80 {", f"http://127.0.0.1:{port} {{")
    (folder / "Caddyfile").write_text("{\nadmin off\n}\n" + conf)
    command = [CADDY, "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]
    with running(command, port, {"HOME": str(folder), "XDG_DATA_HOME": str(folder)}) as url:
        yield url


@contextmanager
def running(command: list[str], port: int, environ: dict[str, str] | None = None) -> Iterator[str]:
    """Run a proxy until the block ends; it listens when the block begins."""
    with subprocess.Popen(command, env={**os.environ, **(environ or {})}) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            with httpx.Client(transport=httpx.HTTPTransport(retries=8)) as client:
                client.get(url)
            yield url
        finally:
            process.terminate()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
        return number


def address_of(server: HttpServer) -> str:
    return server.url.removeprefix("http://").partition("/")[0]
