"""What Anthropic's clients make of the events of a message, which must come in the order that they rely on."""

import json
from typing import Any

from tests.server.http_server import HttpServer

PATH = "/v1/messages"
_DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
_TYPES = {"text": {"text_delta"}, "thinking": {"thinking_delta", "signature_delta"}, "tool_use": {"input_json_delta"}}


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the events of a whole stream, which are named as their data is typed."""
    events = []
    frames = text.split("\n\n")
    assert frames.pop() == ""
    for frame in frames:
        if frame.startswith(":"):
            continue
        name, _, data = frame[frame.index("event: ") :].partition("\ndata: ")
        events.append(json.loads(data))
        assert name == f"event: {events[-1]['type']}"
    return events


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that the events of a whole stream make."""
    first, *middle, delta, last = events
    assert (first["type"], delta["type"], last["type"]) == ("message_start", "message_delta", "message_stop")
    message: dict[str, Any] = first["message"]
    assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], None, 0)
    is_open, arguments = False, ""
    for event in middle:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(message["content"])
                is_open, arguments = True, ""
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert is_open
                block, piece = message["content"][event["index"]], event["delta"]
                assert event["index"] == len(message["content"]) - 1
                assert piece["type"] in _TYPES[block["type"]]
                if piece["type"] == "input_json_delta":
                    arguments += piece["partial_json"]
                else:
                    field = _DELTAS[piece["type"]]
                    block[field] += piece[field]
            case "content_block_stop":
                assert is_open
                is_open = False
                block = message["content"][event["index"]]
                if block["type"] == "tool_use":
                    assert block["input"] == {}
                    block["input"] = json.loads(arguments or "{}")
                if block["type"] == "thinking":
                    assert block["signature"]
            case other:
                raise AssertionError(other)
    assert not is_open
    return {**message, **delta["delta"], "usage": delta["usage"]}


def stream(server: HttpServer, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    """Return the message that a stream makes."""
    with server.client.stream("POST", PATH, json={**body, "stream": True}, headers=headers) as response:
        text = response.read().decode()
        assert response.status_code == 200, text
        assert response.headers["content-type"].startswith("text/event-stream")
        return message_of(events_of(text))


def whole(server: HttpServer, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(PATH, body)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def count(server: HttpServer, body: dict[str, Any]) -> int:
    """Return the tokens of a prompt, as the server counts them."""
    response = server.post(f"{PATH}/count_tokens", body)
    assert response.status_code == 200, response.text
    ((name, found),) = response.json().items()
    assert name == "input_tokens"
    return int(found)


def num_prompt_tokens(reply: dict[str, Any]) -> int:
    kinds = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(reply["usage"][name] for name in kinds)


def without_id(reply: dict[str, Any]) -> dict[str, Any]:
    """Return what two answers to one request have in common."""
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in reply["content"]]
    usage = {"prompt": num_prompt_tokens(reply), "output": reply["usage"]["output_tokens"]}
    return {**{name: reply[name] for name in ("model", "role", "type", "stop_reason", "stop_sequence")},
            "content": blocks, "usage": usage}  # fmt: skip
