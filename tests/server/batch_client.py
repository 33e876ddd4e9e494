"""What tests of batches need of a client."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tests.server.http_server import HttpServer

ENDED = ("completed", "failed", "expired", "cancelled")
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def input_line(custom_id: str, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def as_lines(lines: Sequence[object]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def upload(server: HttpServer, content: bytes, headers: Mapping[str, str] | None = None) -> str:
    """Upload the input of a batch; return its id."""
    form = {"files": {"file": ("in.jsonl", content)}, "data": {"purpose": "batch"}}
    response = server.client.post("/v1/files", **form, headers=headers)  # type: ignore[arg-type]
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


def create(server: HttpServer, content: bytes, endpoint: str, **fields: object) -> dict[str, Any]:
    body = {"input_file_id": upload(server, content), "endpoint": endpoint, "completion_window": "24h", **fields}
    response = server.post("/v1/batches", body)
    assert response.status_code == 200, response.text
    made: dict[str, Any] = response.json()
    return made


def state_of(server: HttpServer, batch_id: str) -> dict[str, Any]:
    found: dict[str, Any] = server.client.get(f"/v1/batches/{batch_id}").json()
    return found


def wait_for_end(server: HttpServer, batch_id: str) -> dict[str, Any]:
    while (batch := state_of(server, batch_id))["status"] not in ENDED:
        assert server.process.poll() is None, server.log
        time.sleep(0.05)
    return batch


def results(server: HttpServer, file_id: str | None) -> list[dict[str, Any]]:
    """Return the lines of an output file or error file; none if there is no such file."""
    if file_id is None:
        return []
    text = server.client.get(f"/v1/files/{file_id}/content").text
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]
