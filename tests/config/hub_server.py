"""As much of the Hugging Face hub's protocol as downloading a snapshot takes, on 127.0.0.1."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer(ThreadingHTTPServer):
    """Serves one model from a folder under one id. `requested` lists the files that were downloaded."""

    daemon_threads = True

    def __init__(self, model_id: str, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model_id, self.folder = model_id, folder
        self.requested: list[str] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def file_names(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a test's output is its own."""

    def _answer(self, *, with_body: bool) -> None:
        model_id, path = self.server.model_id, self.path.split("?")[0]
        for revision in ("main", COMMIT):
            if path == f"/api/models/{model_id}/revision/{revision}":
                return self._send_model_info()
            if path == f"/api/models/{model_id}/tree/{revision}":
                return self._send_tree()
            if path.startswith(prefix := f"/{model_id}/resolve/{revision}/"):
                return self._send_file(path.removeprefix(prefix), with_body=with_body)
        is_known = path.startswith((f"/api/models/{model_id}/", f"/{model_id}/"))
        code = "RevisionNotFound" if is_known else "RepoNotFound"
        return self._send(HTTPStatus.NOT_FOUND, b"", {"X-Error-Code": code})

    def _send_model_info(self) -> None:
        siblings = [{"rfilename": name} for name in self.server.file_names()]
        self._send_json({"id": self.server.model_id, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []})

    def _send_tree(self) -> None:
        sizes = {name: (self.server.folder / name).stat().st_size for name in self.server.file_names()}
        self._send_json([{"type": "file", "path": name, "size": size, "oid": name} for name, size in sizes.items()])

    def _send_json(self, value: object) -> None:
        self._send(HTTPStatus.OK, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send_file(self, name: str, *, with_body: bool) -> None:
        if name not in self.server.file_names():
            return self._send(HTTPStatus.NOT_FOUND, b"", {"X-Error-Code": "EntryNotFound"})
        if with_body:
            self.server.requested.append(name)
        content = (self.server.folder / name).read_bytes()
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        return self._send(HTTPStatus.OK, content, headers, with_body=with_body)

    def _send(self, status: HTTPStatus, body: bytes, headers: dict[str, str], *, with_body: bool = True) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@contextmanager
def serve_hub(model_id: str, folder: Path) -> Iterator[HubServer]:
    """Run the server in a thread for as long as the context lasts."""
    server = HubServer(model_id, folder)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
