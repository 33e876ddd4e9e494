"""A real server as a child process, and clients of it."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import httpx2 as httpx
from tests.breadth import RUNS_ALL

if TYPE_CHECKING:
    from tests.fakes.fork_server import ForkedProgram

START_S = 60.0


class HttpServer:
    """`octavo serve` on a free port, ended with the block.

    Without a model a fake one answers (`tests/fakes`), and the server starts sooner. So it does without a Python of its
    own: forked from a process that has made the imports. In full breadth every server has both.

    What it says goes to a file: a pipe that nobody empties would stop it after so many lines of its log.
    """

    def __init__(
        self,
        *flags: str,
        model: str = "demo",
        python: str = sys.executable,
        has_model: bool = True,
        starts_python: bool = False,
        environ: Mapping[str, str] | None = None,
        **client_options: Any,
    ) -> None:
        arguments = ["serve", model, "--port", "0", *flags]
        environment = {**os.environ, **(environ or {})}
        self._log = tempfile.TemporaryFile("ab")  # noqa: SIM115  # lives as long as the server
        self.process: subprocess.Popen[bytes] | ForkedProgram
        if RUNS_ALL or starts_python or python != sys.executable:
            command = [python, "-m", "octavo.cli.main", *arguments]
            self.process = subprocess.Popen(command, stderr=self._log, env=environment)
        else:
            from tests.fakes import fork_server  # imports psutil, which environments of other projects' clients lack

            stderr = self._log.fileno()
            self.process = fork_server.ForkedProgram(arguments, stderr, environment, has_model=has_model)
        try:
            self.url = self._wait_for_url()
            self.client = httpx.Client(**{"base_url": self.url, "timeout": START_S, **client_options})
        except BaseException:
            self._end()
            raise

    @property
    def log(self) -> str:
        """What the server has said so far. It shares this file's position, so that is left alone."""
        file = self._log.fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode()

    def _wait_for_url(self) -> str:
        deadline_s = time.monotonic() + START_S
        while not (found := re.search(r"listening on ((?:https?://|unix:)[^\s\"]+)[\"\n]", self.log)):
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline_s, self.log
            time.sleep(0.05)
        return found[1]

    def wait_until_ready(self) -> None:
        while self.client.get("/health").status_code == 503:
            assert self.process.poll() is None
            time.sleep(0.02)  # each question takes time from the engine that is loading

    def __enter__(self) -> Self:
        self.wait_until_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        self._end()

    def _end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()

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


def numbers(server: HttpServer) -> dict[str, float]:
    """Return the samples of /metrics; of those with labels, the sum."""
    from prometheus_client.parser import text_string_to_metric_families  # other projects' clients have no need of it

    found: dict[str, float] = {}
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found
