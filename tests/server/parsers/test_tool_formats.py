"""Each format by example: calls, calls among text, and what only looks like a call."""

import json

import pytest
from tests.server.parsers.support import make, parse_pieces, parsed

from octavo.server.openai.parsers.base import ToolCallArguments, ToolCallStart
from octavo.server.openai.parsers.json_calls import HermesParser, Llama3JsonParser, MistralArgsParser, MistralParser
from octavo.server.openai.parsers.pythonic import PythonicParser
from octavo.server.openai.parsers.qwen3_coder import Qwen3CoderParser
from octavo.server.openai.parsers.tool_calls import ToolCallParser

Calls = list[tuple[str, str]]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": "}{\\"é"}}\n</tool_call>', "", [("f", '{"a": "}{\\"é"}')]),
        ('Hi.\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n', "Hi.", [("f", "{}")]),
        ('<tool_call>{"arguments": {"x": 1}, "name": "g"}</tool_call>', "", [("g", '{"x": 1}')]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 2}"}</tool_call>', "", [("f", '{"a": 2}')]),
        ('<tool_call>{"name": "f", "arguments": {}, "id": 3}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),  # no end tag
        ('<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g"}', "", [("f", "{}"), ("g", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),  # cut by the length cap
        ('<tool_call>{"name": "f", "arguments": {"a": 1]}</tool_call>x', "x", [("f", '{"a": 1]}')]),
        ('<tool_call>{"name": "f", "arguments": {}} junk</tool_call>', " junk</tool_call>", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}, 3}</tool_call>', ", 3}</tool_call>", [("f", "{}")]),
        ("<tool_call>oops</tool_call>", "<tool_call>oops</tool_call>", []),
        ('<tool_call> <tool_call>{"name": "f"}</tool_call> ok', "<tool_call> ok", [("f", "{}")]),
        (
            '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
            '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
            [],
        ),
        ('<tool_call>{"name": "\\ud800"}</tool_call>', '<tool_call>{"name": "\\ud800"}</tool_call>', []),
        ("</tool_call> a <b", "</tool_call> a <b", []),
        ("a  <tool", "a  <tool", []),
    ],
)
def test_hermes(text: str, content: str, calls: Calls) -> None:
    assert parsed(HermesParser, text) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ('\n{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
        ('{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}} bye', " bye", [("f", "{}"), ("f", "{}")]),
        ('<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        ('<|python_start|>{"name": "f", "parameters": {}}<|python_end|>', "", [("f", "{}")]),
        ('Well. <|python_tag|>{"name": "f", "arguments": {}}', "Well.", [("f", "{}")]),
        ('{"name": "f", "parameters": {"a": 1]', "", [("f", '{"a": 1]')]),
        ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),  # JSON that was asked for
        ('{"name": "f"}', '{"name": "f"}', []),
        ('{"name": "f", "age": 3}', '{"name": "f", "age": 3}', []),
        ('Text, then {"name": "f", "parameters": {}}', 'Text, then {"name": "f", "parameters": {}}', []),
        ('<|python_tag|>search.call(q="x")', '<|python_tag|>search.call(q="x")', []),
        ("  hello", "  hello", []),
    ],
)
def test_llama3_json(text: str, content: str, calls: Calls) -> None:
    assert parsed(Llama3JsonParser, text) == (content, calls)


@pytest.mark.parametrize("text", ['{"title": ', '{"name": "Bob"', '{"name": "f", "age"', "[1", "Hello"])
def test_llama3_json_shows_other_json_as_soon_as_it_is_no_call(text: str) -> None:
    assert "".join(getattr(delta, "text", "") for delta in make(Llama3JsonParser).push(text)) == text.rstrip()


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (
            '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
            "",
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
        ('Hm.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}', "Hm.", [("f", '{"a": 1}'), ("g", "{}")]),
        ('[TOOL_CALLS]f{"a": 1}, hi', ", hi", [("f", '{"a": 1}')]),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}}, 3]', ", 3]", [("f", "{}")]),
        ('[TOOL_CALLS]f[ARGS]{"a": ]}', "", [("f", '{"a": ]}')]),
        ("[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
        ("[TOOL_CALLS]f(1)", "[TOOL_CALLS]f(1)", []),
        ("see [TOOL", "see [TOOL", []),
    ],
)
def test_mistral(text: str, content: str, calls: Calls) -> None:
    assert parsed(MistralParser, text) == (content, calls)


def test_mistral_ids_have_nine_letters_and_digits_and_keep_those_of_the_model() -> None:
    starts = [
        delta
        for delta in MistralParser({"f": {}}).push("[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}")
        if isinstance(delta, ToolCallStart)
    ]
    assert len(starts[0].id) == 9
    assert starts[0].id.isalnum()
    assert starts[1].id == "abcdefghi"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("[f(a=1, b='x)]'), f()]", "", [("f", '{"a": 1, "b": "x)]"}'), ("f", "{}")]),
        ("[f(a=[1, (2, 3)], b={'k': None}, c=-1.5)]", "", [("f", '{"a": [1, [2, 3]], "b": {"k": null}, "c": -1.5}')]),
        ("[f(a=true, b=False, c=null)]", "", [("f", '{"a": true, "b": false, "c": null}')]),
        ('[f(a="""x"y\n""", b="\\d\\"")]', "", [("f", '{"a": "x\\"y\\n", "b": "\\\\d\\""}')]),
        ("<|python_start|>[f(a='é')]<|python_end|>", "", [("f", '{"a": "é"}')]),
        ("So: <|tool_call_start|>[f()]<|tool_call_end|>", "So:", [("f", "{}")]),
        ("[f()] and more", " and more", [("f", "{}")]),
        ("[f()]\n[f(b=2)] [1]", " [1]", [("f", "{}"), ("f", '{"b": 2}')]),
        ("<|python_start|>no<|python_start|>[f()]", "<|python_start|>no", [("f", "{}")]),
        ('[f(a="\\ud83d\\ude00", b="\\/")]', "", [("f", '{"a": "😀", "b": "/"}')]),
        ("[f(a=1), f(b=)]", ", f(b=)]", [("f", '{"a": 1}')]),
        # Not quite Python, as LFM2 writes it.
        (
            "<|tool_call_start|>[f(a='It's \"so\"', c={'k': 'don't'})]<|tool_call_end|>",
            "",
            [("f", '{"a": "It\'s \\"so\\"", "c": {"k": "don\'t"}}')],
        ),
        ("[f(a='one\ntwo', c=\"three\nfour\")]", "", [("f", '{"a": "one\\ntwo", "c": "three\\nfour"}')]),
        ("[f(from='a', class=1, b=2)]", "", [("f", '{"from": "a", "class": 1, "b": 2}')]),
        ("[f(b=007, c=[-01, 0.05, 00, 10])]", "", [("f", '{"b": 7, "c": [-1, 0.05, 0, 10]}')]),
        ("[f(a='class=x, 007')]", "", [("f", '{"a": "class=x, 007"}')]),
        ("[f(a='x' , b=2 )]", "", [("f", '{"a": "x", "b": 2}')]),
        ("[f(1)]", "[f(1)]", []),
        ("[f(**x)]", "[f(**x)]", []),
        ("[f(a=b)]", "[f(a=b)]", []),
        ("[f(a={1: 2})]", "[f(a={1: 2})]", []),
        ("[f(a=1)(b=2)]", "(b=2)]", [("f", '{"a": 1}')]),
        ("[f(a=1e999)]", "[f(a=1e999)]", []),
        ("[f(a='\\ud800')]", "[f(a='\\ud800')]", []),
        ("[f(a=(]", "[f(a=(]", []),
        ("[other(a=1)]", "[other(a=1)]", []),
        ("[1, 2]", "[1, 2]", []),
        ("[f(a='", "[f(a='", []),
        ("[f(a=" + "-" * 20_000 + "1)]", "[f(a=" + "-" * 20_000 + "1)]", []),
        ("[f(a=" + "[" * 2_000 + "]" * 2_000 + ")]", "[f(a=" + "[" * 2_000 + "]" * 2_000 + ")]", []),
    ],
)
def test_pythonic(text: str, content: str, calls: Calls) -> None:
    assert parsed(PythonicParser, text) == (content, calls)


CODER = """<tool_call>
<function=f>
<parameter=a>
if x < 3:
    print("</b>")

</parameter>
<parameter=b>
12
</parameter>
<parameter=c>
many words
</parameter>
</function>
</tool_call>"""


def test_qwen3_coder() -> None:
    content, [(name, arguments)] = parsed(Qwen3CoderParser, f"Now.\n{CODER}\nDone.")
    assert (content, name) == ("Now.\nDone.", "f")
    assert json.loads(arguments) == {"a": 'if x < 3:\n    print("</b>")\n', "b": 12, "c": "many words"}


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("<tool_call><function=f></function></tool_call>", "", [("f", "{}")]),
        ("<tool_call><function=f>junk", "junk", [("f", "{}")]),
        ("<tool_call><function=f><parameter=a>x", "", [("f", '{"a": "x')]),
        ("<tool_call><function=f><parameter=b>1", "", [("f", '{"b": ')]),
        ("<tool_call>no</tool_call>", "<tool_call>no</tool_call>", []),
        ("<tool_call><function=>", "<tool_call><function=>", []),
        # Tags that models forget.
        ("Hm.\n<function=f>\n</function>\n</tool_call>", "Hm.", [("f", "{}")]),
        ("<function=other></function>", "<function=other></function>", []),
        (
            "<tool_call><function=f><parameter=a>\n<parameter=x>\n<parameter=b>\n2\n</parameter></function>",
            "",
            [("f", '{"a": "<parameter=x>", "b": 2}')],
        ),
        (
            "<tool_call>\n<function=f>\n<parameter=a>\nx\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>",
            "",
            [("f", '{"a": "x"}'), ("g", "{}")],
        ),
        ("<tool_call><function=g></function><tool_call><function=g></function>", "", [("g", "{}"), ("g", "{}")]),
        (
            "<tool_call><function=f><parameter=a\nb>x</parameter></function>",
            "<parameter=a\nb>x</parameter></function>",
            [("f", "{}")],
        ),
        (
            "<tool_call><function=f><parameter=a<b>x</parameter></function>",
            "<parameter=a<b>x</parameter></function>",
            [("f", "{}")],
        ),
    ],
)
def test_qwen3_coder_in_pieces(text: str, content: str, calls: Calls) -> None:
    assert parsed(Qwen3CoderParser, text) == (content, calls)


DECLARED = {
    "type": "object",
    "$defs": {
        "name": {"type": "string"},
        "maybe": {"anyOf": [{"$ref": "#/$defs/name"}, {"type": "null"}]},
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "integer"}]},
        "base": {"properties": {"inherited": {"type": ["string", "null"]}}},
    },
    "allOf": [{"$ref": "#/$defs/base"}],
    "properties": {
        "maybe": {"$ref": "#/$defs/maybe"},
        "flag": {"type": "boolean"},
        "flag_or_text": {"type": ["boolean", "string"]},
        "listed": {"enum": ["1", "None", "True", 2]},
        "constant": {"oneOf": [{"const": "7"}, {"const": 8}]},
        "number": {"anyOf": [{"type": "number"}, {"type": "string"}]},
        "whole": {"allOf": [{"type": ["string", "integer"]}, {"type": ["integer", "null"]}]},
        "loop": {"$ref": "#/$defs/loop"},
        "any": {},
        "object": {"type": "object"},
        "array": {"type": "array", "items": {"type": "boolean"}},
        "nullable": {"type": "integer", "nullable": True},
    },
}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("maybe", "123", "123"),
        ("maybe", "null", None),
        ("maybe", "None", None),
        ("maybe", '{"a": 1}', '{"a": 1}'),
        ("maybe", '"123"', "123"),  # as a grammar makes the model write it
        ("maybe", " two words ", " two words "),
        ("flag", "True", True),
        ("flag", "FALSE", False),
        ("flag_or_text", "True", True),
        ("flag_or_text", "12", "12"),
        ("listed", "1", "1"),
        ("listed", "2", 2),
        ("listed", "None", "None"),
        ("listed", "True", "True"),
        ("constant", "7", "7"),
        ("constant", "8", 8),
        ("number", "1.5", 1.5),
        ("number", "NaN", "NaN"),
        ("number", "-Infinity", "-Infinity"),
        ("number", "1_000", "1_000"),
        ("whole", "5", 5),
        ("loop", "5", 5),
        ("any", "NaN", "NaN"),
        ("any", "True", True),
        ("any", "'x'", "'x'"),
        ("any", "[x] done", "[x] done"),
        ("object", '{"a": [1, NaN]}', '{"a": [1, NaN]}'),
        ("object", "{'a': [True, None], \"b\": {'c': 'd'}}", {"a": [True, None], "b": {"c": "d"}}),
        ("object", '{"a": "x\ny"}', {"a": "x\ny"}),
        ("array", "[true, False]", [True, False]),
        ("nullable", "None", None),
        ("inherited", "12", "12"),
        ("unknown", "12", "12"),
    ],
)
def test_qwen3_coder_values_have_the_types_that_the_schema_allows(key: str, text: str, value: object) -> None:
    whole = f"<tool_call>\n<function=f>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    parser = Qwen3CoderParser({"f": DECLARED})
    message = parse_pieces(parser, list(whole))
    found = json.loads(message.tool_calls[0].arguments, parse_constant=pytest.fail)
    assert found == {key: value}
    assert type(found[key]) is type(value)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (HermesParser, '<tool_call>{"name": "f", "arguments": ARGS}</tool_call>'),
        (HermesParser, '<tool_call>{"arguments": ARGS, "name": "f", "extra": [1]}</tool_call>'),
        (Llama3JsonParser, '{"name": "f", "parameters": ARGS}'),
        (Llama3JsonParser, '{"name": "f", "parameters": ARGS, "extra": 1, "more": {"x": "}"}}'),
        (Llama3JsonParser, '{"parameters": ARGS, "name": "f", "extra": null}'),
        (Llama3JsonParser, '<|python_tag|>{"type": "function", "name": "f", "arguments": ARGS, "id": "7"}'),
        (MistralParser, '[TOOL_CALLS][{"name": "f", "arguments": ARGS, "extra": "]"}]'),
        (MistralArgsParser, "[TOOL_CALLS]f[ARGS]ARGS"),
    ],
)
def test_raw_control_characters_are_escaped_and_other_keys_leave_nothing(kind: type[ToolCallParser], form: str) -> None:
    """In pieces, too; a backslash before a raw line break becomes its escape."""
    written = '{"a":\n "one\ntwo\tthree\x01 \\\n \\" \\\\", "b": [1,\r\n2]}'
    content, [(name, arguments)] = parsed(kind, form[: form.rindex("ARGS")] + written + form[form.rindex("ARGS") + 4 :])
    assert (content, name) == ("", "f")
    assert json.loads(arguments) == {"a": 'one\ntwo\tthree\x01 \n " \\', "b": [1, 2]}


def test_arguments_that_are_json_in_a_string_are_escaped_too() -> None:
    text = '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"one\ntwo\\"}"}</tool_call>'
    _, [(_, arguments)] = parsed(HermesParser, text)
    assert json.loads(arguments) == {"a": "one\ntwo"}


def test_arguments_stream_as_they_come() -> None:
    parser = make(HermesParser)
    assert not parser.push('<tool_call>\n{"name": "f", "argum')
    assert parser.push('ents": {"a"') == [
        ToolCallStart(0, HermesParser.call_id(bytes(12)), "f"),
        ToolCallArguments(0, '{"a"'),
    ]
    assert parser.push(': "x') == [ToolCallArguments(0, ': "x')]
    assert parser.push('"}') == [ToolCallArguments(0, '"}')]
    assert not [*parser.push("}\n</tool_call>"), *parser.finish()]


def test_ids_of_all_answers_differ() -> None:
    text = '<tool_call>{"name": "f"}</tool_call>'
    starts = [
        delta for _ in range(100) for delta in HermesParser({"f": {}}).push(text) if isinstance(delta, ToolCallStart)
    ]
    assert len({start.id for start in starts}) == 100
    assert all(start.id.startswith("call_") for start in starts)


def test_deep_nesting_is_text_like_any_other() -> None:
    deep = '{"a": ' * 5_000
    assert parsed(HermesParser, f'<tool_call>{{"name": "f", "arguments": {deep}') == ("", [("f", deep)])
