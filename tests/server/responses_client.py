"""What OpenAI's clients make of the events of a response, which must come in the order that they rely on."""

import json
from typing import Any

from tests.server.http_server import HttpServer

PATH = "/v1/responses"
_ENDS = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")


def events_of(text: str, first: int = 0) -> list[dict[str, Any]]:
    """Return the events of a stream, which are named as their data is typed, and numbered without gaps."""
    events = []
    frames = text.split("\n\n")
    assert frames.pop() == ""
    for frame in frames:
        if frame.startswith(":"):
            continue
        name, _, data = frame[frame.index("event: ") :].partition("\ndata: ")
        events.append(json.loads(data))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(first, first + len(events)))
    return events


def response_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the response that the events of a whole stream end in; what they build must be its output."""
    created, in_progress, *middle, last = events
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"]["output"] == []
    assert created["response"]["status"] == "in_progress"
    assert created["response"]["usage"] is None
    assert last["type"] in _ENDS
    response: dict[str, Any] = last["response"]
    items: list[dict[str, Any]] = []
    texts: dict[str, str] = {}
    opened: list[str] = []  # what is open: an item, a part of it
    for event in middle:
        kind = event["type"].removeprefix("response.")
        if kind not in ("output_item.added", "output_item.done"):
            assert event["item_id"] == items[event["output_index"]]["id"]
            assert event["output_index"] == len(items) - 1
        match kind:
            case "output_item.added":
                assert opened == []
                assert event["output_index"] == len(items)
                assert event["item"]["status"] == "in_progress"
                items.append(event["item"])
                opened, texts = ["item"], {}
            case "output_item.done":
                assert opened == ["item"]
                opened = []
                assert event["item"]["id"] == items[-1]["id"]
                items[-1] = event["item"]
            case "content_part.added" | "reasoning_summary_part.added":
                assert opened == ["item"]
                assert event["part"]["text"] == ""
                opened.append("part")
            case "content_part.done" | "reasoning_summary_part.done":
                assert opened == ["item", "part"]
                opened.pop()
                assert event["part"]["text"] in texts.values()
            case _ if kind.endswith(".delta"):
                name = kind.removesuffix(".delta")
                texts[name] = texts.get(name, "") + event["delta"]
            case _:
                name = kind.removesuffix(".done")
                [whole] = [event[field] for field in ("text", "arguments", "input") if field in event]
                assert whole == texts.get(name, "")
                texts[name] = whole
    assert opened == []
    assert response["output"] == items
    return response


def stream(server: HttpServer, body: dict[str, Any]) -> dict[str, Any]:
    """Return the response that a stream makes."""
    return response_of(stream_events(server, body))


def stream_events(server: HttpServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    with server.client.stream("POST", PATH, json={**body, "stream": True}) as response:
        text = response.read().decode()
        assert response.status_code == 200, text
        assert response.headers["content-type"].startswith("text/event-stream")
        return events_of(text)


def whole(server: HttpServer, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(PATH, body)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def text_of(reply: dict[str, Any]) -> str:
    """Return what a response says."""
    return "".join(part["text"] for item in reply["output"] if item["type"] == "message" for part in item["content"])


def without_ids(reply: dict[str, Any]) -> dict[str, Any]:
    """Return what two answers to one request have in common."""
    output = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")} for item in reply["output"]
    ]
    usage = {name: value for name, value in reply["usage"].items() if name != "input_tokens_details"}
    changing = ("id", "created_at", "completed_at")
    return {name: value for name, value in reply.items() if name not in changing} | {"output": output, "usage": usage}
