"""A client that cuts its connection in the middle of a stream, and comes back."""

import http.client
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from tests.server.http_server import HttpServer, numbers

COMPLETIONS = "/v1/completions"
ANN, BOB = ({"Authorization": f"Bearer {name}"} for name in ("ann", "bob"))  # ANN sends all that nobody else sends


class RawStream:
    """One response, read event by event; `cut` drops the connection."""

    def __init__(
        self,
        server: HttpServer,
        body: Mapping[str, Any] | None,
        *,
        path: str = COMPLETIONS,
        headers: Mapping[str, str] | None = None,
        method: str = "POST",
        before_answer: Callable[[], None] | None = None,
    ) -> None:
        """With `before_answer`, that is called, and the connection cut, before there is a response."""
        address = urlsplit(server.url)
        assert address.hostname is not None
        self._connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60.0)
        data = None if body is None else json.dumps(body).encode()
        self._connection.request(method, path, data, {"Content-Type": "application/json", **ANN, **(headers or {})})
        if before_answer is not None:
            before_answer()
            self._connection.close()
            return
        self.response = self._connection.getresponse()
        self.status = self.response.status
        self._body = b""
        if not self.response.headers.get("content-type", "").startswith("text/event-stream"):
            self._body = self.response.read()
            self.cut()

    def events(self, limit: int | None = None) -> list[bytes]:
        """Return the next events, to the end of the stream or up to a number; comments are none."""
        found: list[bytes] = []
        while limit is None or len(found) < limit:
            lines = list(iter(self.response.readline, b"\n"))
            if lines and not lines[-1]:
                raise ConnectionError(b"".join(found))
            if any(line.startswith(b"data:") for line in lines):
                found.append(b"".join(lines) + b"\n")
                if lines[-1] == b"data: [DONE]\n":
                    self.cut()
                    break
        return found

    def cut(self) -> None:
        self._connection.close()
        self.response.close()

    def json(self) -> Any:
        return json.loads(self._body)

    @property
    def error_code(self) -> str:
        return str(self.json()["error"]["code"])


def event_id(event: bytes) -> str:
    """Return the id of an event."""
    found = re.match(rb"id: (\S+)\n", event)
    assert found is not None, event
    return found[1].decode()


def texts(events: list[bytes]) -> dict[int, str]:
    """Return the text of each choice of a completion."""
    found: dict[int, str] = {}
    for chunk in chunks(events):
        for choice in chunk["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


def chunks(events: list[bytes]) -> Iterator[dict[str, Any]]:
    for event in events:
        data = event.partition(b"data: ")[2].strip()
        if data != b"[DONE]":
            yield json.loads(data)


def without_name(events: list[bytes]) -> list[bytes]:
    """Return the events of a stream without what is new in each: its id and its time."""
    name = event_id(events[0]).partition(":")[0].encode()
    created = b'"created":%d' % next(chunks(events))["created"]
    return [event.replace(name, b"NAME").replace(created, b"TIME") for event in events]


def key(name: str) -> dict[str, str]:
    return {"Idempotency-Key": name}


def back(event: bytes) -> dict[str, str]:
    return {"Last-Event-ID": event_id(event)}


def wait_for_idle(server: HttpServer) -> None:
    while numbers(server)["octavo_requests_running"]:
        time.sleep(0.01)


def wait_until_it_runs(server: HttpServer, num_samples: int = 1) -> None:
    while numbers(server)["octavo_requests_running"] < num_samples:
        time.sleep(0.01)
