"""`octavo top` shows what a server's metrics say."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console
from typer.testing import CliRunner

from octavo.cli.main import app
from octavo.cli.top import screen
from octavo.contracts.engine import SchedulerStats
from octavo.metrics.collect import EngineMetrics, HttpMetrics
from octavo.metrics.prometheus import Exposition
from octavo.metrics.scrape import Change, Scrape


class Metrics(ThreadingHTTPServer):
    """Has metrics at /metrics, for those who have the key."""

    engine: EngineMetrics | None = None
    text: bytes | None = None


class _Handler(BaseHTTPRequestHandler):
    server: Metrics

    def do_GET(self) -> None:
        is_welcome = self.headers.get("Authorization") == "Bearer k"
        exposition = Exposition(HttpMetrics(), lambda: self.server.engine, "m", with_vllm_names=False)
        body = (self.server.text or exposition.render()[0]) if is_welcome else b'{"error": {"message": "no key"}}'
        self.send_response(200 if is_welcome else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    server = Metrics(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def top(server: Metrics, *flags: str) -> tuple[int, str, str]:
    url = f"http://127.0.0.1:{server.server_address[1]}"
    done = CliRunner().invoke(app, ["top", "--url", url, "--interval", "0.01", *flags], env={"COLUMNS": "200"})
    return done.exit_code, done.stdout, done.stderr


def test_one_look(metrics: Metrics) -> None:
    metrics.engine = EngineMetrics()
    metrics.engine.stats = SchedulerStats(num_running=3, num_waiting=2, deferred={"grammar": 1})
    code, text, _ = top(metrics, "--api-key", "k")
    assert code == 0
    assert "m at http://127.0.0.1" in text
    assert "3 running, 2 waiting (held: 1 grammar)" in text
    assert "\x1b" not in text


def test_a_server_that_is_loading(metrics: Metrics) -> None:
    code, text, _ = top(metrics, "--api-key", "k")
    assert (code, "(loading)" in text) == (0, True)


def test_latencies_and_rates() -> None:
    engine = EngineMetrics()
    render = Exposition(HttpMetrics(), lambda: engine, "m", with_vllm_names=False).render
    before = Scrape.of(render()[0].decode(), 0.0)
    engine.num_generation_tokens = 5000
    engine.time_to_first_token.observe(0.05, 10)
    table = screen(Change(before, Scrape.of(render()[0].decode(), 2.0)), "url")
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table)
    assert "2,500 out" in captured.get()
    assert " ms, p90 " in captured.get()


def test_what_cannot_be_watched_is_one_line(metrics: Metrics) -> None:
    for text, flags, complaint in (
        (None, (), "Pass the server's key with --api-key"),
        (b"<html>", ("--api-key", "k"), "no metrics of Octavo"),
        (None, ("--interval", "0"), "greater than 0"),
    ):
        metrics.text = text
        code, _, said = top(metrics, *flags)
        assert code in (1, 2)
        assert complaint in said or "not Prometheus text" in said
        assert len(said.splitlines()) == 1


def test_no_server() -> None:
    done = CliRunner().invoke(app, ["top", "--url", "http://127.0.0.1:9"])
    assert done.exit_code == 1
    assert "no connection to 127.0.0.1:9" in done.stderr
