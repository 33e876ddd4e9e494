"""Blocks of the Messages API as messages of a chat, and the events that a message's pieces become."""

import json
from typing import Any

import msgspec
import pytest

from octavo.server.anthropic.blocks import Turn, chat_messages, system_text
from octavo.server.anthropic.protocol import Block
from octavo.server.anthropic.stream import BlockWriter, folded
from octavo.server.http.errors import ApiError
from octavo.server.openai.parsers.base import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}
LINKED = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
PIECES: list[Delta] = [
    Reasoning("a"), Reasoning("b"), Content("c"), ToolCallStart(0, "one", "f"), ToolCallArguments(0, '{"x"'),
    ToolCallArguments(0, ": 1}"), ToolCallStart(1, "two", "g"), Content("d"), Reasoning("ab"), Content("e"),
    Content("f"),
]  # fmt: skip


def say(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def result(content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "c1", "content": content, **fields}


def plain(role: str, *blocks: dict[str, Any], sees: bool = True) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the messages of one turn, and the warnings."""
    turn, warnings = Turn(role, "messages[4]"), list[str]()
    turn.add(msgspec.convert(list(blocks), list[Block]), "messages[4].content")
    messages = [each.chat for each in chat_messages(turn, warnings.append, takes_images=sees)]
    return [msgspec.to_builtins(message) for message in messages], warnings


def test_results_come_before_what_is_said_and_their_images_after_the_last_of_them() -> None:
    messages, warnings = plain(
        "user", result([say("a"), IMAGE, say("b")]), result("failed", is_error=True), result(None), say("And?"), LINKED
    )
    assert [message["role"] for message in messages] == ["tool", "tool", "tool", "user"]
    assert messages[0]["content"] == "a\n\n[the image is shown after the results]\n\nb"
    assert [message["content"] for message in messages[1:3]] == ["Error: failed", ""]
    image, said, linked = messages[3]["content"]
    assert image["image_url"]["url"] == "data:application/octet-stream;base64,iVBO"
    assert said == say("And?")
    assert linked["image_url"]["url"] == "https://example.org/a.png"
    assert warnings == []


def test_a_model_that_takes_only_text_is_told_of_images_in_results() -> None:
    messages, warnings = plain("user", result([IMAGE]), sees=False)
    assert [message["content"] for message in messages] == ["[an image, which this model cannot see]"]
    assert len(warnings) == 1


def test_documents_and_finds_are_text() -> None:
    document = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}
    parts = {"type": "document", "source": {"type": "content", "content": [say("x"), say("y")]}}
    find = {"type": "search_result", "title": "F", "source": "https://a", "content": [say("z")]}
    tool = {"type": "tool_reference", "tool_name": "grep"}
    [message], _ = plain("user", document, parts, find)
    assert message["content"] == "T\nD\n\nx\n\ny\n\nF\nhttps://a\nz"
    assert plain("user", result([find, tool]))[0][0]["content"] == "F\nhttps://a\nz\n\ngrep"


def test_an_answer_keeps_thoughts_text_and_calls_apart() -> None:
    blocks = (
        {"type": "thinking", "thinking": "t", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        say("a"),
    )
    call = {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}, "cache_control": {"type": "ephemeral"}}
    [message], _ = plain("assistant", *blocks, call, {"type": "tool_use", "id": "c2", "name": "g"})
    functions = [each["function"] for each in message["tool_calls"]]
    assert (message["content"], message["reasoning_content"]) == ("a", "t")
    assert functions == [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]
    assert [each["id"] for each in message["tool_calls"]] == ["c1", "c2"]


@pytest.mark.parametrize(
    ("role", "block", "path"),
    [
        ("user", {"type": "image", "source": "x"}, "messages[4].content[0].source"),
        ("user", {"type": "image", "source": {"type": "file"}}, "messages[4].content[0].source.type"),
        ("user", {"type": "image", "source": {"type": "base64"}}, "messages[4].content[0].source.data"),
        ("user", {"type": "document"}, "messages[4].content[0].source"),
        ("user", {"type": "document", "source": {"type": "base64", "data": "x"}}, "messages[4].content[0].source.type"),
        ("user", result([{"type": "tool_use"}]), "messages[4].content[0].content[0].type"),
        ("user", result([{"type": "tool_reference"}]), "messages[4].content[0].content[0].tool_name"),
        ("assistant", {"type": "tool_use", "id": "a"}, "messages[4].content[0].name"),
        ("assistant", {"type": "tool_use", "name": "a"}, "messages[4].content[0].id"),
        ("assistant", {"type": "server_tool_use"}, "messages[4].content[0].type"),
        ("system", IMAGE, "messages[4].content[0].type"),
    ],
)
def test_blocks_that_mean_nothing_here_are_named(role: str, block: dict[str, Any], path: str) -> None:
    with pytest.raises(ApiError) as caught:
        plain(role, block)
    assert (caught.value.status, caught.value.detail.param) == (400, path)
    assert path in caught.value.detail.message


def test_only_the_billing_line_is_left_out_of_the_system_prompt() -> None:
    line = "x-anthropic-billing-header: cc_version=2; cch=1;"
    for system in (f"{line}\nA\nB", [Block(type="text", text=line), Block(type="text", text="A\nB")]):
        assert system_text(system, keeps_billing_header=False) == "A\nB"
        assert system_text(system, keeps_billing_header=True).startswith(line)
    assert system_text(f"A {line}", keeps_billing_header=False) == f"A {line}"
    assert system_text(None, keeps_billing_header=False) == system_text(line, keeps_billing_header=False) == ""


def test_each_block_ends_before_the_next_begins() -> None:
    writer = BlockWriter(shows_thoughts=True)
    events = [event for piece in PIECES for event in writer.write(piece)] + writer.end()
    assert writer.end() == []
    kinds = "".join({"start": "(", "delta": ".", "stop": ")"}[event["type"].rpartition("_")[2]] for event in events)
    assert kinds == "(...)" + "(.)" + "(..)" + "()" + "(.)" + "(..)" + "(..)"
    assert [event["index"] for event in events if event["type"] == "content_block_start"] == list(range(7))
    signed = [at for at, event in enumerate(events) if event.get("delta", {}).get("type") == "signature_delta"]
    assert all(events[at + 1]["type"] == "content_block_stop" for at in signed)
    blocks = json.loads(msgspec.json.encode(folded(events)))
    shown = [block.get("text", block.get("thinking", block.get("input"))) for block in blocks]
    assert shown == ["ab", "c", {"x": 1}, {}, "d", "ab", "ef"]
    assert blocks[0]["signature"] == blocks[5]["signature"]  # of the same thought


def test_arguments_that_are_no_object_are_kept_as_text() -> None:
    for text in ('{"x": ', "[1]", "nonsense"):
        writer = BlockWriter(shows_thoughts=True)
        pieces = (ToolCallStart(0, "one", "f"), ToolCallArguments(0, text))
        [block] = folded([event for piece in pieces for event in writer.write(piece)])
        assert block.input == {"INVALID_JSON": text}
