"""Items of the Responses API as messages of a chat, and the items that an answer's pieces become."""

import json
from base64 import b64encode
from typing import Any

import msgspec
import pytest

from octavo.server.http.errors import ApiError
from octavo.server.openai.parsers.base import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart
from octavo.server.openai.protocol import ChatMessage
from octavo.server.openai.translation import Conversation, Translated
from octavo.server.responses.items import covered
from octavo.server.responses.protocol import ResponsesRequest
from octavo.server.responses.tools import InputReader, chat_tools, custom_input
from octavo.server.responses.translate import translated
from octavo.server.responses.writer import ItemWriter
from octavo.tokenizer.chat_template import ChatTemplate

IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,iVBO"}
SHELL = {"type": "custom", "name": "shell"}
SPACE = {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "read"}, SHELL]}


def text(value: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": kind, "text": value}


def messages_of(
    *items: dict[str, Any], sees: bool = True, template: ChatTemplate | None = None, **fields: Any
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the chat of these items, and the warnings."""
    warnings: list[str] = []
    request = msgspec.convert({"input": list(items), **fields}, ResponsesRequest)
    chat = translated(request, (), warnings.append, template=template, takes_images=sees).chat
    return [msgspec.to_builtins(message) for message in chat.messages], warnings


def test_a_later_system_message_is_the_users_where_the_template_has_no_place_for_it() -> None:
    """The beginning of the prompt stays what it was, and roles alternate."""
    late: dict[str, Any] = {"role": "developer", "content": "late"}
    before: list[dict[str, Any]] = [{"role": "developer", "content": "rules"}, {"role": "user", "content": "a"}]
    answered: list[dict[str, Any]] = [
        late,
        {"role": "assistant", "content": "b"},
        late,
        {"role": "user", "content": [text("c"), IMAGE]},
    ]
    only_first = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('x') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    messages, [warning] = messages_of(*before, *answered, late, {"role": "user", "content": "d"}, template=only_first)
    assert "later system messages" in warning
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert [message["content"] for message in messages[:2]] == ["rules", "a\n\nlate"]
    assert [part.get("text") for part in messages[3]["content"]] == ["late", "c", None, "late", "d"]
    elsewhere, warnings = messages_of(
        *before, *answered, template=ChatTemplate("{% for m in messages %}{{ m }}{% endfor %}")
    )
    assert [message["role"] for message in elsewhere] == ["system", "user", "system", "assistant", "system", "user"]
    assert warnings == []


def test_first_system_messages_are_one_where_the_template_has_place_for_one() -> None:
    conversation = Conversation(takes_late_system=False)
    for number in range(3):
        conversation.add(Translated(ChatMessage(role="system", content=f"{number}")), f"system[{number}]")
    assert [message.content for message in conversation.messages] == ["0\n\n1\n\n2"]
    assert conversation.places == {"messages[0]": "system[0]"}
    assert not conversation.has_moved


def test_items_of_the_assistant_are_one_message() -> None:
    messages, warnings = messages_of(
        {"role": "user", "content": "a"},
        {"type": "reasoning", "summary": [text("s", "summary_text")], "content": [text("t", "reasoning_text")]},
        {"type": "message", "role": "assistant", "content": [text("b", "output_text")]},
        {"type": "function_call", "name": "f", "call_id": "1", "arguments": "{}"},
        {"type": "custom_tool_call", "name": "shell", "call_id": "2", "input": "ls"},
        {"type": "function_call_output", "call_id": "1", "output": [text("x"), text("y")]},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "z"},
        tools=[SHELL],
    )
    assert warnings == []
    user, answer, first, second = messages
    assert user == {"role": "user", "content": "a"}
    assert (answer["content"], answer["reasoning_content"]) == ("b", "t")
    assert [call["function"] for call in answer["tool_calls"]] == [
        {"name": "f", "arguments": "{}"},
        {"name": "shell", "arguments": {"input": "ls"}},
    ]
    assert [(each["tool_call_id"], each["content"]) for each in (first, second)] == [("1", "x\n\ny"), ("2", "z")]


def test_instructions_and_what_the_developer_says_first_are_one_message() -> None:
    messages, _ = messages_of(
        {"role": "developer", "content": "b"},
        {"role": "system", "content": [text("c")]},
        {"role": "user", "content": "d"},
        {"role": "developer", "content": "e"},
        {"role": "user", "content": "f"},
        instructions="a",
    )
    assert [(each["role"], each["content"]) for each in messages] == [
        ("system", "a\n\nb\n\nc"), ("user", "d"), ("system", "e"), ("user", "f"),
    ]  # fmt: skip


def test_images_of_results_follow_the_last_of_them() -> None:
    call = {"type": "function_call", "name": "f", "call_id": "1"}
    output = {"type": "function_call_output", "call_id": "1", "output": [text("a"), IMAGE]}
    messages, _ = messages_of(call, output, output)
    assert [each["role"] for each in messages] == ["assistant", "tool", "tool", "user"]
    assert [part["type"] for part in messages[-1]["content"]] == ["image_url", "image_url"]
    messages, warnings = messages_of(call, output, sees=False)
    assert messages[-1]["content"] == "a\n\n[an image, which this model cannot see]"
    assert len(warnings) == 1


def test_calls_of_tools_that_the_client_runs_are_calls() -> None:
    action = {"type": "exec", "command": ["ls"]}
    messages, warnings = messages_of(
        {"type": "local_shell_call", "id": "x", "call_id": "1", "status": "completed", "action": action},
        {"type": "local_shell_call_output", "call_id": "1", "output": {"code": 0}},
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "compaction", "encrypted_content": "x"},
    )
    function = messages[0]["tool_calls"][0]["function"]
    assert function == {"name": "local_shell", "arguments": {"action": action}}
    assert messages[1]["content"] == '{"code": 0}'
    assert len(warnings) == 2


def test_files_are_text() -> None:
    data = "data:text/plain;base64," + b64encode("é".encode()).decode()
    [message], _ = messages_of(
        {"role": "user", "content": [{"type": "input_file", "filename": "a.txt", "file_data": data}, text("?")]}
    )
    assert message["content"] == "a.txt\né\n\n?"
    for wrong in ("data:,", "%%%", b64encode(b"%PDF\x00").decode()):
        with pytest.raises(ApiError, match="file_data"):
            messages_of({"role": "user", "content": [{"type": "input_file", "file_data": wrong}]})


def test_a_covered_thought_is_read_and_a_damaged_one_is_not() -> None:
    thought = {"type": "reasoning", "summary": [], "encrypted_content": covered("tö")}
    said = {"role": "assistant", "content": "a"}
    assert messages_of(thought, said)[0][0]["reasoning_content"] == "tö"
    messages, warnings = messages_of(thought | {"encrypted_content": "octavo:%"}, said)
    assert "reasoning_content" not in messages[0]
    assert len(warnings) == 1


def test_tools_of_a_namespace_have_joined_names_in_the_chat() -> None:
    places: dict[str, str] = {}
    names = chat_tools([{"type": "web_search"}, SPACE, SHELL], places, lambda warning: None)
    assert [tool.function.name for tool in names.definitions] == ["files__read", "files__shell", "shell"]
    assert places == {"tools[0]": "tools[1].tools[0]", "tools[1]": "tools[1].tools[1]", "tools[2]": "tools[2]"}
    assert names.in_chat("shell", "files") == "files__shell"
    assert (names.of_call("files__shell").is_custom, names.of_call("other").is_custom) == (True, False)


def test_the_input_of_a_custom_tool_is_raw() -> None:
    assert custom_input('{"input": "a\\nb"}') == "a\nb"
    assert custom_input('{"input": "a') == '{"input": "a'
    assert custom_input('{"other": 1}') == '{"other": 1}'


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "a\\n\\"b\\" \\u00e9 \\ud83d\\ude00 \\\\"}', 'a\n"b" é 😀 \\'),
        (' {\n "input":"x"}', "x"),
        ('{"input": "a\\', "a"),
        ('{"input": "ab\\ud83d', "ab"),
        ('{"other": 1}', '{"other": 1}'),
        ('{"x": 1, "input": "late"}', "late"),
        ('{"inp', '{"inp'),
        ("", ""),
    ],
)
def test_the_input_of_a_custom_tool_comes_as_it_is_written(arguments: str, expected: str) -> None:
    for size in (1, 2, 5, 100):
        reader = InputReader()
        pieces = [reader.push(arguments[at : at + size]) for at in range(0, len(arguments), size)]
        pieces.append(reader.finish())
        assert ("".join(pieces), reader.text) == (expected, expected)


PIECES: list[Delta] = [
    Reasoning("a"), Reasoning("b"), Content("c"), ToolCallStart(0, "one", "files__read"), ToolCallArguments(0, '{"x"'),
    ToolCallArguments(0, ": 1}"), ToolCallStart(1, "two", "shell"), ToolCallArguments(1, '{"input": "l'),
    ToolCallArguments(1, 's"}'), Content("d"), Content("e"),
]  # fmt: skip


@pytest.mark.parametrize("summaries", [False, True])
def test_pieces_become_items(summaries: bool) -> None:
    events: list[dict[str, Any]] = []

    def emit(kind: str, /, **fields: Any) -> None:
        events.append({"type": kind, **json.loads(msgspec.json.encode(fields))})

    names = chat_tools([SPACE, SHELL], {}, lambda warning: None)
    writer = ItemWriter("n", names, emit, shows_summaries=summaries, covers_thoughts=True)
    for piece in PIECES:
        writer.write(piece)
    writer.end(is_cut=True)
    items = msgspec.to_builtins(writer.items)
    assert [item["type"] for item in items] == [
        "reasoning", "message", "function_call", "custom_tool_call", "message",
    ]  # fmt: skip
    assert [item["status"] for item in items] == ["completed"] * 4 + ["incomplete"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == items
    thought, said, call, custom, last = items
    kind, field = ("summary_text", "summary") if summaries else ("reasoning_text", "content")
    assert thought[field] == [{"type": kind, "text": "ab"}]
    assert thought["encrypted_content"] == covered("ab")
    assert (said["content"][0]["text"], last["content"][0]["text"]) == ("c", "de")
    assert (call["namespace"], call["name"], call["arguments"]) == ("files", "read", '{"x": 1}')
    assert (custom["name"], custom["input"]) == ("shell", "ls")
    assert len({item["id"] for item in items}) == 5
