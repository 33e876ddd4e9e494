"""How a server comes up: HTTP first, then the model; and what its process never loads."""

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.server.conftest import Start
from tests.server.http_server import HttpServer


def test_http_answers_while_the_model_is_loading(start: Start) -> None:
    """Requests are asked to come back."""
    running, health, response = start.server, start.health, start.reply
    if health.status_code == 503:  # so it is but on the slowest of machines
        assert health.json()["status"] == "loading"
        assert health.json()["error"]["code"] == "loading"
        assert "retry-after" in health.headers
        assert "(" in health.json()["error"]["message"] or "starting" in health.json()["error"]["message"]
        assert "s so far" in health.json()["error"]["message"]
    if response.status_code != 200:
        assert response.status_code == 503
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}
        assert "retry-after" in response.headers
    assert running.client.get("/health").json() == {"status": "ok"}
    assert running.client.get("/ready").status_code == 200
    summary = r"^octavo: demo is ready after [\d.]+ s; KV cache: ([\d,]+) tokens, .*; (http\S+)$"
    ready = re.findall(summary, running.log, re.MULTILINE)
    assert [url for _, url in ready] == [running.url]
    info = running.client.get("/server_info").json()
    assert f"{info['kv_cache_tokens']:,}" == ready[0][0]


def test_a_port_that_is_taken_is_told(server: HttpServer) -> None:
    port = server.url.rpartition(":")[2]
    command = [sys.executable, "-m", "octavo.cli.main", "serve", "demo", "--port", port]
    taken = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert taken.returncode == 2
    assert "--port" in taken.stderr.splitlines()[-1]


def test_a_model_that_is_not_there_ends_the_program(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "octavo.cli.main", "serve", str(tmp_path / "none"), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 2
    assert "there is no such folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_library_of_torch_is_in_a_server_that_has_answered(server: HttpServer) -> None:
    """Nor in the process that checks constraints, which another test may have started."""
    assert server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2}).status_code == 200
    parent = psutil.Process(server.process.pid)
    processes = (parent, *parent.children())
    with_torch = [process for process in processes if _maps(process, "libtorch")]
    cores = [process for process in with_torch if process.cmdline()[-1] != "import"]  # the others are spare
    assert ["octavo.engine.core_proc" in process.cmdline() for process in cores] == [True]
    # And nobody has what computes on GPUs.
    assert not [process for process in processes if _maps(process, "libtriton") or _maps(process, "libcuda.so")]


def _maps(process: psutil.Process, library: str) -> bool:
    return any(library in mapped.path for mapped in process.memory_maps())


@pytest.mark.full
def test_the_server_does_without_torch_and_transformers() -> None:
    """With an engine in a process of its own: all that is loaded before a request and for it."""
    program = """
import asyncio, sys
from octavo.config.args import EngineArgs
from octavo.metrics.collect import HttpMetrics
from octavo.server.app import create_app
from octavo.server.args import ServerArgs
from octavo.server.lifecycle import EngineLifecycle
from octavo.server.openai.birth import Birth
from octavo.server.openai.protocol import ChatCompletionRequest, ChatMessage

async def main():
    lifecycle = EngineLifecycle(EngineArgs(engine_process=True), ServerArgs())
    create_app(lifecycle, ServerArgs(), HttpMetrics())
    lifecycle.start_loading()
    running = asyncio.create_task(lifecycle.run())
    while lifecycle.status == "loading":
        await asyncio.sleep(0.05)
    request = ChatCompletionRequest(messages=[ChatMessage(role="user", content="hi")], max_tokens=2)
    reply = await (await lifecycle.service.begin_chat(request, print, False, Birth())).whole()
    assert reply.usage.completion_tokens == 2
    running.cancel()
    await lifecycle.close()

asyncio.run(main())
print(*sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "transformers")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.strip() == ""
