"""`octavo serve` in the hands of an operator: how it ends, what it listens on, what it tells."""

import json
import shutil
import signal
import ssl
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
from tests.server.http_server import HttpServer, numbers, parse_events

QUESTION: dict[str, Any] = {"messages": [{"role": "user", "content": "What is a block?"}]}
LONG: dict[str, Any] = {**QUESTION, "max_tokens": 1500, "ignore_eos": True, "stream": True}
CHAT = "/v1/chat/completions"
END_S = 20.0


def wait_for_log(server: HttpServer, text: str) -> None:
    deadline_s = time.monotonic() + END_S
    while text not in server.log:
        assert time.monotonic() < deadline_s, server.log
        time.sleep(0.02)


def run_octavo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octavo.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=END_S, check=False)


# -- how it ends


def test_parsers_that_are_off_and_sigterm_lets_a_stream_finish() -> None:
    """And the exit code is 0."""
    with HttpServer("--reasoning-parser", "none", "--tool-call-parser", "none", has_model=False) as server:
        asked: dict[str, Any] = {
            "thinking_token_budget": 5,
            "tools": [{"type": "function", "function": {"name": "now"}}],
        }
        for field, value in asked.items():
            refused = server.post(CHAT, {**QUESTION, field: value})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
        thinking = {"chat_template_kwargs": {"enable_thinking": True}, "temperature": 0, "max_tokens": 5}
        reply = server.post(CHAT, QUESTION | thinking).json()
        assert "reasoning" not in reply["choices"][0]["message"]
        body = {**LONG, "max_tokens": 400}
        with server.client.stream("POST", CHAT, json=body) as response:
            lines = response.iter_lines()
            next(lines)
            for process in (server.process, *psutil.Process(server.process.pid).children()):
                process.send_signal(signal.SIGTERM)  # to all of them, as service managers do
            wait_for_log(server, "shutting down: 1 requests")
            health = httpx.get(f"{server.url}/health")
            assert (health.status_code, health.json()["status"]) == (503, "draining")
            refused = httpx.post(f"{server.url}{CHAT}", json=QUESTION)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert refused.headers["retry-after"]
            rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""]
        assert not any('"error"' in line for line in rest)
        assert server.process.wait(END_S) == 0, server.log


@pytest.mark.full
def test_a_second_signal_breaks_streams_off_and_the_exit_code_tells() -> None:
    with HttpServer() as server, server.client.stream("POST", CHAT, json=LONG) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        wait_for_log(server, "shutting down")
        server.process.send_signal(signal.SIGTERM)
        rest = "\n".join(lines)
        assert '"code":"draining"' in rest
        assert rest.endswith("data: [DONE]\n")
        assert server.process.wait(END_S) == 1
        assert "1 requests cancelled" in server.log
        assert "Traceback" not in server.log


def test_when_the_engine_dies_for_ever_streams_are_told_and_the_exit_code_is_not_0() -> None:
    server = HttpServer("--max-restarts", "0", has_model=False)
    with server, server.client.stream("POST", CHAT, json=LONG) as response:
        lines = response.iter_lines()
        next(lines)
        (engine,) = psutil.Process(server.process.pid).children()
        engine.send_signal(signal.SIGKILL)
        assert '"code":"engine_dead"' in "\n".join(lines)
        assert httpx.get(f"{server.url}/health").status_code == 503
        assert server.process.wait(END_S) == 1
        assert "killed by signal 9" in server.log


def test_a_signal_while_the_model_loads_ends_it() -> None:
    with ExitStack() as stack:
        server = HttpServer()
        stack.push(server)  # leaves without having waited for the model
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(END_S) == 0, server.log
        assert psutil.wait_procs(children, timeout=END_S)[1] == []


# -- what it listens on


def test_listening_beyond_loopback_without_a_key_is_refused() -> None:
    done = run_octavo("serve", "--host", "0.0.0.0", "--port", "0")
    assert done.returncode == 2
    assert "--no-auth" in done.stderr


@pytest.mark.full
@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_tls(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1",
            "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
            "-keyout", str(key), "-out", str(certificate)]  # fmt: skip
    subprocess.run(make, check=True, capture_output=True)
    trust = ssl.create_default_context(cafile=str(certificate))
    with HttpServer("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), verify=trust) as server:
        assert server.url.startswith("https://")
        assert server.client.get("/health").json() == {"status": "ok"}
        assert server.post(CHAT, {**QUESTION, "max_tokens": 4}).status_code == 200
    key.write_text("no key")
    done = run_octavo("serve", "--port", "0", "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    assert done.returncode == 2
    assert "ssl_certfile" in done.stderr


def test_a_unix_socket_and_settings_from_flag_environment_and_file(tmp_path: Path) -> None:
    """One server for both: each takes seconds to start."""
    socket, file = tmp_path / "s", tmp_path / "octavo.yaml"
    file.write_text("log-format: json\nmax-model-len: 512\nmax-num-seqs: 3\nserved-model-name: [from-file]\n")
    template = tmp_path / "shout.jinja"
    template.write_text("{% for m in messages %}LOUD {{ m.content }}{% endfor %}")
    environ = {"OCTAVO_MAX_NUM_SEQS": "4", "OCTAVO_API_KEY": "sesame", "OCTAVO_VLLM_METRICS": "true"}
    flags = ("--config", str(file), "--served-model-name", "a", "--served-model-name", "b",
             "--chat-template", str(template), "--stats-interval-s", "1e-6", "--uds", str(socket))  # fmt: skip
    client: dict[str, Any] = {"base_url": "http://octavo", "transport": httpx.HTTPTransport(uds=str(socket))}
    with HttpServer(*flags, has_model=False, environ=environ, headers={"x-api-key": "sesame"}, **client) as server:
        assert server.url == f"unix:{socket}"
        assert run_octavo("serve", "--uds", str(socket)).returncode == 2  # somebody is there
        cards = server.client.get("/v1/models").json()["data"]
        assert [(card["id"], card["max_model_len"]) for card in cards] == [("a", 512), ("b", 512)]
        prompt = server.post("/tokenize", QUESTION).json()["tokens"]
        assert server.post("/detokenize", {"tokens": prompt}).json()["prompt"].endswith("LOUD What is a block?")
        headers = {"X-Request-Id": "mine"}
        answer = server.client.post(CHAT, json={**LONG, "max_tokens": 40}, headers=headers)
        assert len(parse_events(answer.text)) > 1
        assert numbers(server)["vllm:generation_tokens_total"] == 40
        shown = server.client.get("/metrics").text
        assert 'http_requests_total{handler="/v1/chat/completions",method="POST",status="2xx"} 1.0' in shown
        assert 'vllm:cache_config_info{block_size="' in shown
        assert "sesame" not in server.client.get("/server_info").text
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(END_S) == 0
        assert not socket.exists()
        lines = [json.loads(line) for line in server.log.splitlines()]  # nothing but JSON
    messages = [line["message"] for line in lines]
    assert "setting max_num_seqs: 4  # OCTAVO_MAX_NUM_SEQS" in messages
    assert f"setting max_model_len: 512  # {file}" in messages
    assert 'setting served_model_name: ["a","b"]  # --served-model-name' in messages
    assert not any("sesame" in message for message in messages)
    (access,) = [line for line in lines if line.get("request_id") == "mine"]
    assert (access["status"], access["completion_tokens"]) == (200, 40)
    assert access["prompt_tokens"] == len(prompt)
    assert any(line["logger"] == "octavo.metrics.log" for line in lines)


# -- what it tells


def test_show_settings_prints_all_and_leaves() -> None:
    done = run_octavo("serve", "--port", "7", "--api-key", "sesame", "--show-settings")
    assert done.returncode == 0
    assert "port: 7  # --port" in done.stdout
    assert "max_num_seqs: 256  # default" in done.stdout
    assert "sesame" not in done.stdout
