"""Responses that are kept: to go on from, to ask for again, in the background, over a kill of the server."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.server.http_server import HttpServer
from tests.server.responses_client import PATH, events_of, response_of, text_of, whole

from octavo.server.args import ServerArgs
from octavo.server.http.errors import ApiError
from octavo.server.responses.protocol import ReplyItem, ReplyPart, Response
from octavo.server.responses.store import ResponseStore, with_ids

ASK: dict[str, Any] = {"input": "What is a block?", "seed": 1, "max_output_tokens": 8, "ignore_eos": True}
LONG = ASK | {"background": True, "max_output_tokens": 1500}
KEYS = ("--api-key", "one", "--api-key", "two")


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with HttpServer("--block-size", "4", *KEYS, has_model=False, headers={"authorization": "Bearer one"}) as running:
        yield running


def get(server: HttpServer, response_id: str, **query: Any) -> Any:
    response = server.client.get(f"{PATH}/{response_id}", params=query)
    assert response.status_code == 200, response.text
    return response.json()


def ended(server: HttpServer, response_id: str) -> dict[str, Any]:
    """Return a response when it is over."""
    deadline_s = time.monotonic() + 60
    while (reply := get(server, response_id))["status"] in ("queued", "in_progress"):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    return dict(reply)


def test_a_conversation_goes_on_from_a_response(server: HttpServer) -> None:
    first = whole(server, ASK | {"instructions": "Not carried over."})
    second = whole(server, ASK | {"input": "And then?", "previous_response_id": first["id"]})
    third = whole(server, ASK | {"input": "And?", "previous_response_id": second["id"], "stream": False})
    said = [{"role": "assistant", "content": text_of(each)} for each in (first, second)]
    question, then, more = ({"role": "user", "content": text} for text in (ASK["input"], "And then?", "And?"))
    items = [question, said[0], then, said[1], more]
    assert text_of(whole(server, ASK | {"input": items, "store": False})) == text_of(third)
    assert third["usage"]["input_tokens"] == whole(server, ASK | {"input": items})["usage"]["input_tokens"]
    assert third["previous_response_id"] == second["id"]
    referred = [*items[:3], {"type": "item_reference", "id": second["output"][0]["id"]}, items[4]]
    assert text_of(whole(server, ASK | {"input": referred})) == text_of(third)


def test_a_response_is_there_until_it_is_deleted(server: HttpServer) -> None:
    with server.client.stream("POST", PATH, json=ASK | {"stream": True}) as streamed:
        reply = response_of(events_of(streamed.read().decode()))
    assert get(server, reply["id"]) == reply
    [item] = get(server, f"{reply['id']}/input_items")["data"]
    assert (item["role"], item["content"], item["type"]) == ("user", ASK["input"], "message")
    assert item["id"]
    assert server.client.delete(f"{PATH}/{reply['id']}").json() == {
        "id": reply["id"], "object": "response", "deleted": True,
    }  # fmt: skip
    for response in (server.client.get(f"{PATH}/{reply['id']}"), server.client.delete(f"{PATH}/{reply['id']}")):
        assert response.status_code == 404
    lost = server.post(PATH, ASK | {"previous_response_id": reply["id"]})
    assert (lost.status_code, lost.json()["error"]["code"]) == (400, "previous_response_not_found")


def test_input_items_come_in_pages(server: HttpServer) -> None:
    items = [{"role": "user", "content": str(number)} for number in range(5)]
    reply = whole(server, ASK | {"input": items})
    path = f"{reply['id']}/input_items"
    page = get(server, path, limit=2, order="asc")
    assert [item["content"] for item in page["data"]] == ["0", "1"]
    assert (page["has_more"], page["last_id"]) == (True, page["data"][-1]["id"])
    rest = get(server, path, after=page["last_id"], order="asc")
    assert [item["content"] for item in rest["data"]] == ["2", "3", "4"]
    assert [item["content"] for item in get(server, path)["data"]] == ["4", "3", "2", "1", "0"]
    for wrong in ({"limit": "x"}, {"limit": 0}, {"order": "up"}, {"after": "nothing"}):
        assert server.client.get(f"{PATH}/{path}", params=wrong).status_code == 400


def test_others_do_not_find_it(server: HttpServer) -> None:
    reply, other = whole(server, ASK), {"authorization": "Bearer two"}
    assert server.client.get(f"{PATH}/{reply['id']}", headers=other).status_code == 404
    told = server.client.post(PATH, json=ASK | {"previous_response_id": reply["id"]}, headers=other)
    assert told.json()["error"]["code"] == "previous_response_not_found"
    reference = {"type": "item_reference", "id": reply["output"][0]["id"]}
    assert server.client.post(PATH, json=ASK | {"input": [reference]}, headers=other).status_code == 400


def test_one_that_is_not_to_be_kept_is_not(server: HttpServer) -> None:
    reply = whole(server, ASK | {"store": False})
    assert reply["store"] is False
    assert server.client.get(f"{PATH}/{reply['id']}").status_code == 404
    assert server.post(PATH, ASK | {"store": False, "background": True}).status_code == 400


def test_the_tokens_of_a_request_are_counted(server: HttpServer) -> None:
    counted = server.post(f"{PATH}/input_tokens", ASK)
    assert counted.json() == {
        "object": "response.input_tokens",
        "input_tokens": whole(server, ASK)["usage"]["input_tokens"],
    }


def test_a_response_in_the_background(server: HttpServer) -> None:
    body = ASK | {"max_output_tokens": 100}
    begun = whole(server, body | {"background": True})
    assert (begun["status"], begun["output"], begun["usage"], begun["background"]) == ("queued", [], None, True)
    reply = ended(server, begun["id"])
    assert reply["status"] == "incomplete"
    assert text_of(reply) == text_of(whole(server, body))
    events = server.client.get(f"{PATH}/{begun['id']}", params={"stream": "true"})
    assert response_of(events_of(events.text)) == reply
    rest = server.client.get(f"{PATH}/{begun['id']}", params={"stream": "true", "starting_after": 4})
    assert events_of(rest.text, first=5)[-1]["response"] == reply
    over = server.client.post(f"{PATH}/{begun['id']}/cancel")
    assert over.json() == reply
    plain = whole(server, ASK)
    assert server.client.post(f"{PATH}/{plain['id']}/cancel").status_code == 400
    assert server.client.get(f"{PATH}/{plain['id']}", params={"stream": "true"}).status_code == 400


def test_a_stream_in_the_background_goes_on_without_its_client(server: HttpServer) -> None:
    body = ASK | {"background": True, "stream": True, "max_output_tokens": 100}
    with server.client.stream("POST", PATH, json=body) as response:
        first = next(response.iter_raw()).decode()
    response_id = first.split('"id":"', 1)[1].partition('"')[0]
    assert text_of(ended(server, response_id)) == text_of(whole(server, ASK | {"max_output_tokens": 100}))


def test_a_response_in_the_background_is_cancelled(server: HttpServer) -> None:
    begun = whole(server, LONG)
    while get(server, begun["id"])["status"] == "queued":
        time.sleep(0.01)
    cancelled = server.client.post(f"{PATH}/{begun['id']}/cancel").json()
    assert cancelled["status"] == "cancelled"
    assert get(server, begun["id"]) == cancelled
    assert cancelled["usage"]["output_tokens"] < 1500
    forgotten = whole(server, LONG)["id"]
    assert server.client.delete(f"{PATH}/{forgotten}").status_code == 200
    assert server.client.get(f"{PATH}/{forgotten}").status_code == 404
    while server.client.get("/load").json()["server_load"]:
        time.sleep(0.01)


@pytest.mark.full
def test_what_is_kept_outlives_the_server(tmp_path: Path) -> None:
    """One that was being computed in the background is computed by the next server, with the same bytes."""
    flags = ("--state-dir", str(tmp_path / "state"), "--seed", "1")
    with HttpServer(*flags, has_model=False) as server:
        first = whole(server, ASK)
        background = ASK | {"background": True, "max_output_tokens": 300, "temperature": 1, "seed": 3}
        begun = whole(server, background)["id"]
        while get(server, begun)["status"] == "queued":
            time.sleep(0.01)
        server.process.kill()
        server.process.wait()
    with HttpServer(*flags, has_model=False) as server:
        assert get(server, first["id"]) == first
        assert whole(server, ASK | {"previous_response_id": first["id"]})["output"]
        reply = ended(server, begun)
        assert reply["status"] == "incomplete"
        expected = whole(server, {name: value for name, value in background.items() if name != "background"})
        assert text_of(reply) == text_of(expected)


def response(number: int, previous: int | None = None, size: int = 1000) -> Response:
    item = ReplyItem(type="message", id=f"msg_{number}_0", status="completed", content=[])
    item.content = [ReplyPart(type="output_text", text="x" * size)]
    before = None if previous is None else f"resp_{previous}"
    return Response(
        id=f"resp_{number}", created_at=0, model="m", status="completed", output=[item], previous_response_id=before
    )


async def test_the_store_is_bounded_and_no_chain_loses_its_beginning() -> None:
    store = ResponseStore(ServerArgs(response_store_mib=1))
    for number in range(4):
        await store.put("o", response(number, None if number in (0, 3) else number - 1, 200_000), [])
    for number in (0, 1, 2):  # what others go on from is used with them
        await store.history("o", f"resp_{number}")
    await store.put("o", response(4, 2, 400_000), [])
    with pytest.raises(ApiError, match="not found"):
        await store.get("o", "resp_3")
    assert len(await store.history("o", "resp_4")) == 4
    await store.put("o", response(5, None, 2 * 2**20), [])  # larger than all there is
    with pytest.raises(ApiError, match="not found"):
        await store.get("o", "resp_5")
    await store.put("o", response(6, None, 900_000), [])
    with pytest.raises(ApiError, match="not found"):
        await store.history("o", "resp_4")
    store.close()


async def test_the_store_outlives_its_server(tmp_path: Path) -> None:
    for number in range(2):
        store = ResponseStore(ServerArgs(state_dir=str(tmp_path)))
        await store.put(
            "o", response(number, number - 1 if number else None), with_ids([{"role": "user"}], str(number))
        )
        assert len(await store.history("o", f"resp_{number}")) == 2 * number + 2
        store.close()
    assert (tmp_path / "responses.sqlite3").stat().st_mode & 0o077 == 0


async def test_old_responses_go() -> None:
    store = ResponseStore(ServerArgs(response_store_days=1e-9))
    await store.put("o", response(0), [])
    await store.put("o", response(1), [])
    with pytest.raises(ApiError, match="not found"):
        await store.get("o", "resp_0")
    store.close()


def test_input_items_have_ids() -> None:
    items = with_ids([{"role": "user", "content": "x"}, {"type": "reasoning", "id": "rs_1"}], "n")
    assert [(item["id"], item["type"]) for item in items] == [("msg_n_in0", "message"), ("rs_1", "reasoning")]
    assert msgspec.to_builtins(items[0])["content"] == "x"


@pytest.mark.parametrize("headers", [{}, {"idempotency-key": "k"}])
def test_a_stream_that_fails_says_so_as_its_api_does(server: HttpServer, headers: dict[str, str]) -> None:
    body = ASK | {"stream": True, "max_output_tokens": 1500}
    limit = {"x-request-timeout": "0.5", **headers}
    with server.client.stream("POST", PATH, json=body, headers=limit) as response:
        events = events_of(response.read().decode())
    last = events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "request_timeout"
    assert last["response"]["output"][0]["status"] == "incomplete"
