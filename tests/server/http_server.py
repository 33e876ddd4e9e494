"""A real server as a child process, and clients of it."""

import json
import re
import subprocess
import sys
from types import TracebackType
from typing import Any, Self

import httpx2 as httpx

START_S = 60.0


class HttpServer:
    """`octavo serve` on a free port, ended with the block."""

    def __init__(self, *flags: str, model: str = "demo") -> None:
        command = [sys.executable, "-m", "octavo.cli.main", "serve", model, "--port", "0", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.url = self._wait_for_url()
        self.client = httpx.Client(base_url=self.url, timeout=START_S)

    def _wait_for_url(self) -> str:
        assert self.process.stderr is not None
        lines = []
        for line in self.process.stderr:
            lines.append(line)
            if found := re.search(r"https?://\S+", line):
                return found[0]
        raise AssertionError("".join(lines))

    def wait_until_ready(self) -> None:
        while self.client.get("/health").status_code == 503:
            assert self.process.poll() is None

    def __enter__(self) -> Self:
        self.wait_until_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        self.process.kill()
        self.process.communicate()

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.client.post(path, json=body)

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the chunks of a stream, which must have ended with [DONE]."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            return parse_events(response.read().decode())


def parse_events(text: str) -> list[dict[str, Any]]:
    """Return the JSON of the events of a whole stream."""
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2] if not event.startswith(":")]
