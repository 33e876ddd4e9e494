"""Batches over HTTP: the answers of single requests, mistakes by line, ownership, cancel and expiry."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.server.batch_client import (
    CHAT,
    COMPLETION,
    as_lines,
    create,
    input_line,
    results,
    state_of,
    upload,
    wait_for_end,
)
from tests.server.http_server import HttpServer

KEYS = ("--api-key", "one", "--api-key", "two")
ONE, TWO = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
LONG = {"prompt": "x", "max_tokens": 100_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parent") / "state"


@pytest.fixture(scope="module")
def server(state_dir: Path) -> Iterator[HttpServer]:
    flags = ("--state-dir", str(state_dir), "--max-batch-lines", "30", *KEYS)
    with HttpServer(*flags, "--max-body-bytes", "10000", has_model=False, headers=ONE) as running:
        yield running
        assert "Traceback" not in running.log


def test_lines_get_the_answers_of_single_requests(server: HttpServer) -> None:
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": f"Say {n}"}], "max_tokens": n + 1, "n": 1 + n % 2, "seed": n}
        for n in range(6)
    ]
    bodies += [{"messages": [], "max_tokens": 4}, {"messages": "x"}, {"messages": bodies[0]["messages"], "top_p": 5}]
    bodies += [{"messages": bodies[0]["messages"], "model": "other"}, {**bodies[0], "timeout": -1}]
    content = as_lines([input_line(f"id {n}", CHAT, body) for n, body in enumerate(bodies)])
    batch = create(server, content, CHAT, metadata={"of": "test"})
    assert batch["status"] == "validating"
    assert batch["expires_at"] == batch["created_at"] + 86400
    ended = wait_for_end(server, batch["id"])
    times = [ended[f"{name}_at"] for name in ("created", "in_progress", "finalizing", "completed")]
    assert times == sorted(times)
    assert (ended["status"], ended["metadata"], ended["errors"]) == ("completed", {"of": "test"}, None)
    assert ended["request_counts"] == {"total": 11, "completed": 6, "failed": 5}
    answers, errors = (results(server, ended[name]) for name in ("output_file_id", "error_file_id"))
    assert [line["custom_id"] for line in answers + errors] == [f"id {n}" for n in range(11)]  # in the input's order
    for line, body in zip(answers + errors, bodies, strict=True):
        direct = server.post(CHAT, body)
        assert line.keys() == {"id", "custom_id", "response", "error"}
        assert line["error"] is None
        assert line["id"].startswith("batch_req_")
        response = line["response"]
        assert response.keys() == {"status_code", "request_id", "body"}
        assert response["status_code"] == direct.status_code
        assert timeless(response["body"]) == timeless(direct.json())
    usages = [line["response"]["body"]["usage"] for line in answers]
    usage = ended["usage"]
    assert usage["input_tokens"] == sum(each["prompt_tokens"] for each in usages) > 0
    assert usage["output_tokens"] == sum(each["completion_tokens"] for each in usages) > 0
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    files = [server.client.get(f"/v1/files/{ended[name]}").json() for name in ("output_file_id", "error_file_id")]
    assert [file["purpose"] for file in files] == ["batch_output"] * 2


def timeless(body: dict[str, Any]) -> dict[str, Any]:
    """Return a reply without what differs between two equal requests."""
    usage = {name: count for name, count in body.get("usage", {}).items() if name != "prompt_tokens_details"}
    rest = {name: value for name, value in body.items() if name != "timings"}  # those of a line are nobody's
    return {**rest, "id": None, "created": None, "usage": usage}


def test_a_file_with_mistakes_fails_with_their_lines(server: HttpServer) -> None:
    good = input_line("a", COMPLETION, {"prompt": "x"})
    lines = [
        json.dumps(good),
        "",
        "{no json",
        "[]",
        json.dumps({**good, "custom_id": 5}),
        json.dumps({name: value for name, value in good.items() if name != "method"}),
        json.dumps(good),
        json.dumps({**good, "custom_id": "b", "method": "GET"}),
        json.dumps({**good, "custom_id": "c", "url": CHAT}),
        json.dumps({**good, "custom_id": "d", "body": [1]}),
        json.dumps({**good, "custom_id": "e", "body": {"prompt": "x", "stream": True}}),
        json.dumps({**good, "custom_id": ""}),
        json.dumps({**good, "custom_id": "f", "body": {"prompt": "x" * 10_000}}),
    ]
    batch = wait_for_end(server, create(server, "\n".join(lines).encode(), COMPLETION)["id"])
    assert batch["status"] == "failed"
    assert batch["failed_at"] >= batch["created_at"]
    assert batch["errors"]["object"] == "list"
    assert [(error["line"], error["code"], error["param"]) for error in batch["errors"]["data"]] == [
        (3, "invalid_json_line", None),
        (4, "invalid_type", None),
        (5, "invalid_type", None),
        (6, "missing_required_parameter", "method"),
        (7, "duplicate_custom_id", "custom_id"),
        (8, "invalid_method", "method"),
        (9, "invalid_url", "url"),
        (10, "invalid_type", "body"),
        (11, "unsupported_parameter", "body.stream"),
        (12, "invalid_custom_id", "custom_id"),
        (13, "line_too_large", None),
    ]
    assert batch["output_file_id"] is batch["error_file_id"] is None
    for content, code in (
        (b"\n\n", "empty_file"),
        (as_lines([good | {"custom_id": f"{n}"} for n in range(31)]), "too_many_lines"),
    ):
        batch = wait_for_end(server, create(server, content, COMPLETION)["id"])
        assert [error["code"] for error in batch["errors"]["data"]] == [code]


def test_batches_that_are_refused(server: HttpServer) -> None:
    file_id = upload(server, b"{}")
    good = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    wrong: list[tuple[dict[str, Any], int, str]] = [
        ({"input_file_id": "file-none"}, 404, "input_file_id"),
        ({"input_file_id": upload(server, b"{}", TWO)}, 404, "input_file_id"),
        ({"endpoint": "/v1/models"}, 400, "endpoint"),
        ({"endpoint": None}, 400, "endpoint"),
        ({"completion_window": "soon"}, 400, "completion_window"),
        ({"completion_window": "15d"}, 400, "completion_window"),
        ({"metadata": {"a": 1}}, 400, "metadata[...]"),
        ({"metadata": {"a" * 65: "b"}}, 400, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, 400, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, 400, "output_expires_after.seconds"),
    ]
    for fields, status, param in wrong:
        response = server.post("/v1/batches", good | fields)
        assert (response.status_code, response.json()["error"]["param"]) == (status, param), fields


def test_batches_belong_to_a_key_and_are_listed_newest_first(server: HttpServer) -> None:
    content = as_lines([input_line("a", COMPLETION, {"prompt": "x", "max_tokens": 1})])
    ids = [create(server, content, COMPLETION)["id"] for _ in range(3)][::-1]
    first = server.client.get("/v1/batches", params={"limit": 2}).json()
    assert ([batch["id"] for batch in first["data"]], first["has_more"]) == (ids[:2], True)
    rest = server.client.get("/v1/batches", params={"limit": 1, "after": ids[1]}).json()
    assert [batch["id"] for batch in rest["data"]] == ids[2:]
    assert server.client.get("/v1/batches", headers=TWO).json()["data"] == []
    assert server.client.get("/v1/batches", params={"limit": 101}).status_code == 400
    for path in (f"/v1/batches/{ids[0]}", f"/v1/batches/{ids[0]}/cancel"):
        method = "POST" if path.endswith("cancel") else "GET"
        response = server.client.request(method, path, headers=TWO)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
    output = wait_for_end(server, ids[0])["output_file_id"]
    assert server.client.get(f"/v1/files/{output}/content", headers=TWO).status_code == 404


def test_cancelling_keeps_the_answers_that_are_there(server: HttpServer) -> None:
    lines = [input_line("short", COMPLETION, {"prompt": "x", "max_tokens": 2})]
    lines += [input_line(f"long {n}", COMPLETION, LONG) for n in range(3)]
    batch = create(server, as_lines(lines), COMPLETION)
    while state_of(server, batch["id"])["request_counts"]["completed"] == 0:
        time.sleep(0.02)
    in_use = server.client.delete(f"/v1/files/{batch['input_file_id']}")
    assert (in_use.status_code, in_use.json()["error"]["code"]) == (400, "file_in_use")
    cancelled = server.client.post(f"/v1/batches/{batch['id']}/cancel").json()
    assert cancelled["status"] == "cancelling"
    ended = wait_for_end(server, batch["id"])
    assert ended["status"] == "cancelled"
    assert ended["cancelling_at"] <= ended["cancelled_at"]
    assert ended["request_counts"] == {"total": 4, "completed": 1, "failed": 3}
    assert [line["custom_id"] for line in results(server, ended["output_file_id"])] == ["short"]
    errors = results(server, ended["error_file_id"])
    assert [(line["custom_id"], line["response"], line["error"]["code"]) for line in errors] == [
        (f"long {n}", None, "batch_cancelled") for n in range(3)
    ]
    assert server.client.post(f"/v1/batches/{batch['id']}/cancel").json() == ended
    assert server.client.delete(f"/v1/files/{batch['input_file_id']}").status_code == 200
    while server.client.get("/load").json()["server_load"] > 1:  # the lines are no longer computed
        time.sleep(0.02)


def test_what_is_not_done_in_time_is_said_to_be_expired(server: HttpServer) -> None:
    lines = [input_line("short", COMPLETION, {"prompt": "x", "max_tokens": 2}), input_line("long", COMPLETION, LONG)]
    batch = create(server, as_lines(lines), COMPLETION, completion_window="2s")
    ended = wait_for_end(server, batch["id"])
    assert ended["status"] == "expired"
    assert ended["expires_at"] <= ended["expired_at"]
    assert [line["custom_id"] for line in results(server, ended["output_file_id"])] == ["short"]
    [late] = results(server, ended["error_file_id"])
    assert (late["custom_id"], late["error"]["code"]) == ("long", "batch_expired")
    refused = server.client.post(f"/v1/batches/{batch['id']}/cancel")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "batch_not_cancellable")


def test_lines_outlive_the_engine_process(server: HttpServer) -> None:
    lines = [
        input_line(f"{n}", COMPLETION, {"prompt": "x", "max_tokens": 40 + n, "ignore_eos": True}) for n in range(20)
    ]
    batch = create(server, as_lines(lines), COMPLETION)
    while state_of(server, batch["id"])["status"] != "in_progress":
        time.sleep(0.01)
    for child in psutil.Process(server.process.pid).children():
        if any("core" in argument for argument in child.cmdline()):
            child.kill()
    ended = wait_for_end(server, batch["id"])
    assert ended["request_counts"] == {"total": 20, "completed": 20, "failed": 0}


def test_a_description_of_the_routes_is_there(server: HttpServer) -> None:
    page = server.client.get("/openapi.json").json()
    for path in ("/v1/files", "/v1/files/{file_id}/content", "/v1/batches", "/v1/batches/{batch_id}/cancel"):
        for operation in page["paths"][path].values():
            assert operation["description"]
    form = page["paths"]["/v1/files"]["post"]["requestBody"]["content"]
    assert form.keys() == {"multipart/form-data"}


@pytest.mark.usefixtures("server")
def test_a_second_server_with_the_same_folder_is_refused(state_dir: Path) -> None:
    with pytest.raises(AssertionError, match="in use by another server"):
        HttpServer("--state-dir", str(state_dir), has_model=False)
