"""A server with two models, of which one is loaded at a time: every API reaches both, and requests wait and say why."""

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.server.batch_client import as_lines, create, input_line, results, wait_for_end
from tests.server.http_server import HttpServer
from typer.testing import CliRunner

from octavo.cli.main import app
from octavo.demo import demo_model_path

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is a block?"}],
    "max_tokens": 6,
    "ignore_eos": True,
}
LONG = ASK | {"max_tokens": 400}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(demo_model_path(), folder, ignore=shutil.ignore_patterns("vl", "adapters", "*.py", "__pycache__"))
    return str(folder)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def server(other: str, logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    flags = ("--max-loaded", "1", "--model-alias", "fast-*=other", "--model-alias", "big=demo")
    folders = ("--state-dir", str(tmp_path_factory.mktemp("state")), "--request-log", str(logs))
    with HttpServer(other, *flags, *folders, has_model=False) as running:
        yield running


def states(server: HttpServer) -> list[str]:
    return [card["state"] for card in server.client.get("/v1/models").json()["data"]]


def test_all_models_are_listed_with_their_state(server: HttpServer, other: str) -> None:
    assert server.post(CHAT, ASK).json()["model"] == "demo"
    listed = server.client.get("/v1/models").json()
    assert [card["id"] for card in listed["data"]] == ["demo", other]
    assert [entry["slug"] for entry in listed["models"]] == ["demo", other]
    assert states(server) == ["loaded", "unloaded"]
    assert server.client.get("/v1/models/OTHER").json()["state"] == "unloaded"
    assert server.client.get("/v1/models/nothing").status_code == 404
    assert [each["name"] for each in server.client.get("/api/tags").json()["models"]] == [
        "demo:latest",
        f"{other}:latest",
    ]
    assert [each["name"] for each in server.client.get("/api/ps").json()["models"]] == ["demo:latest"]
    health = server.client.get("/health").json()
    assert (health["status"], health["models"]) == ("ok", {"demo": "loaded", other: "unloaded"})


def test_every_api_reaches_both(server: HttpServer, other: str) -> None:
    said = {"role": "user", "content": "Hello"}
    requests: list[tuple[str, dict[str, Any]]] = [
        (CHAT, ASK),
        ("/v1/completions", {"prompt": "x", "max_tokens": 2}),
        ("/v1/messages", {"messages": [said], "max_tokens": 2}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 2}),
    ]
    for path, body in requests:
        reply = server.post(path, body | {"model": "fast-1"})
        assert (reply.status_code, reply.json()["model"]) == (200, other), reply.text
    first = reply.json()
    lines = server.post("/api/chat", {"model": "other:latest", "messages": [said], "stream": False})
    assert lines.status_code == 200, lines.text
    assert server.post("/tokenize", {"model": "other", "prompt": "x"}).status_code == 200
    assert states(server) == ["unloaded", "loaded"]
    assert server.client.get("/server_info").json()["settings"]["model_name"] == other
    wrong = server.post(CHAT, ASK | {"model": "nothing"})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
    for path, body in requests:
        assert server.post(path, body | {"model": "big"}).json()["model"] == "demo"
    body = {"model": "demo", "input": "And?", "previous_response_id": first["id"], "max_output_tokens": 4}
    assert server.post("/v1/responses", body).json()["status"] == "incomplete"
    assert server.client.get(f"/v1/responses/{first['id']}").json()["model"] == other
    assert server.post(CHAT, {"model": 3}).status_code == 400
    text = server.client.get("/metrics").text
    assert 'octavo_requests_running{model_name="demo"}' in text


@pytest.mark.parametrize("temperature", [1, pytest.param(-1, marks=pytest.mark.full)])
def test_a_stream_waits_for_its_model_and_says_why(server: HttpServer, other: str, temperature: int) -> None:
    """What is wrong with a request that has waited ends its stream."""
    loaded, wanted = ("demo", other) if states(server)[0] == "loaded" else (other, "demo")
    with ThreadPoolExecutor() as threads:
        running = threads.submit(server.stream, CHAT, LONG | {"model": loaded})
        while not server.client.get("/load").json()["server_load"]:
            time.sleep(0.01)
        asked = ASK | {"model": wanted, "stream": True, "temperature": temperature}
        with server.client.stream("POST", CHAT, json=asked) as response:
            text = response.read().decode()
        assert text.startswith(f": {wanted}")  # waits for a place, or is being loaded
        assert text.endswith("}\n\ndata: [DONE]\n\n")
        assert ('"param":"temperature"' in text) == (temperature < 0)
        assert running.result()[-1]["choices"][0]["finish_reason"] == "length"


def test_lines_of_a_batch_name_their_models(server: HttpServer, other: str) -> None:
    names = {"demo": "demo", "other": other, "fast-1": other, "nothing": None}
    lines = [input_line(name, CHAT, ASK | {"model": name}) for name in names]
    ended = wait_for_end(server, create(server, as_lines(lines), CHAT)["id"])
    answers = results(server, ended["output_file_id"])
    assert {line["custom_id"]: line["response"]["body"]["model"] for line in answers} == {
        name: model for name, model in names.items() if model
    }
    [failed] = results(server, ended["error_file_id"])
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("nothing", 404)
    assert server.client.get("/v1/files").json()["data"]


def test_each_model_has_a_log_of_its_requests(server: HttpServer, logs: Path) -> None:
    for name in ("demo", "other"):
        reply = server.post(CHAT, ASK | {"model": name}).json()["id"]
        listed = ("replay", "--list", "--request-log", str(logs / name))
        while reply not in CliRunner().invoke(app, listed).output:
            time.sleep(0.05)


def test_a_core_that_is_killed_is_replaced_and_its_requests_go_on(server: HttpServer) -> None:
    name = "demo" if states(server)[0] == "loaded" else "other"
    expected = server.post(CHAT, LONG | {"model": name, "seed": 1}).json()["choices"][0]["message"]
    with ThreadPoolExecutor() as threads:
        running = threads.submit(server.post, CHAT, LONG | {"model": name, "seed": 1})
        while not server.client.get("/load").json()["server_load"]:
            time.sleep(0.01)
        time.sleep(0.1)
        for child in psutil.Process(server.process.pid).children():
            child.kill()
        assert running.result().json()["choices"][0]["message"] == expected


@pytest.mark.full
def test_a_model_that_cannot_be_loaded_harms_nobody(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    flags = ("--idle-unload-s", "0.3", "--state-dir", str(tmp_path / "state"))
    with HttpServer(str(tmp_path / "broken"), *flags, has_model=False) as server:
        refused = server.post(CHAT, ASK | {"model": "broken"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_failed")
        assert server.post(CHAT, ASK).status_code == 200
        lines = [input_line(name, CHAT, ASK | {"model": name}) for name in ("demo", "broken")]
        ended = wait_for_end(server, create(server, as_lines(lines), CHAT)["id"])
        assert [ended["request_counts"][kind] for kind in ("completed", "failed")] == [1, 1]
        while states(server) != ["unloaded", "unloaded"]:
            time.sleep(0.05)
        assert server.client.get("/health").status_code == 200
        assert server.post(CHAT, ASK).status_code == 200


@pytest.mark.full
def test_what_a_kill_has_interrupted_is_computed_again_by_its_model(tmp_path: Path, other: str) -> None:
    body = {"input": "Hello", "max_output_tokens": 300, "ignore_eos": True, "seed": 3, "model": "other"}
    flags = (other, "--state-dir", str(tmp_path / "state"))
    with HttpServer(*flags, has_model=False) as server:
        begun = server.post("/v1/responses", body | {"background": True}).json()["id"]
        while server.client.get(f"/v1/responses/{begun}").json()["status"] == "queued":
            time.sleep(0.01)
        server.process.kill()
        server.process.wait()
    with HttpServer(*flags, has_model=False) as server:
        while (reply := server.client.get(f"/v1/responses/{begun}").json())["status"] == "in_progress":
            time.sleep(0.05)
        expected = server.post("/v1/responses", body).json()
        assert (reply["model"], reply["status"]) == (other, "incomplete")
        assert reply["output"][0]["content"] == expected["output"][0]["content"]
