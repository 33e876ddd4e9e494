"""A text follows a grammar exactly when its JSON follows the grammar's form for JSON."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from octavo.errors import InvalidParameterError
from octavo.structured.json_text import in_json_object, matching_in_json_object

BYTES = LLTokenizer("byte")
PATCH = r"""
start: begin hunk+ end
begin: "*** Begin" LF
end: "*** End" LF?
hunk: "*** Add: " filename LF line+ | "*** Delete: " filename LF  // what becomes of a file
filename: /(.+)/
line: "+" /(.*)/ LF -> line
%import common.LF
"""


def follows(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def check(grammar: str, in_json: str, good: list[str], bad: list[str]) -> None:
    for text in good + bad:
        spelled = json.dumps({"input": text}, ensure_ascii=False)
        assert (text, follows(grammar, text), follows(in_json, spelled)) == (text, text in good, text in good)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (
            PATCH,
            [
                '*** Begin\n*** Add: a\n+x "q" \\ü\t\n*** Delete: d/\\n\n*** End',
                "*** Begin\n*** Delete: a/b\\c\n*** End\n",
            ],
            ["*** Begin\n*** End\n", "*** Begin\n*** Delete: \n*** End\n"],
        ),
        ('start: "a".."c" " ".."~" "x\\"y"i', ['a"x"Y', 'b\\X"y'], ["d", "a\nx"]),
        ("%import common (WS, ESCAPED_STRING, INT)\nstart: ESCAPED_STRING WS INT", ['"a\\"b" \n7'], ['"a"b" 7']),
        ("%import common.NEWLINE -> NL\nstart: text NL (B ~ 2)\ntext: /a|/\nB: /b/", ["a\nbb", "\r\nbb"], ["\nb"]),
        ('start: /a.b/s "/" /c.\\x22/', ['a\nb/cc"'], ['a\nb/c\n"']),
        ('start: /a"b\\s/i', ['A"B\n', 'a"b '], ['A"B']),
    ],
)
def test_a_grammar(grammar: str, good: list[str], bad: list[str]) -> None:
    check(grammar, in_json_object("input", grammar), good, bad)


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"[a-c]{2,4}", ["ab", "abca"], ["a", "abcd"]),
        (r'a/b\/c"\\[\r\n]?', ['a/b/c"\\', 'a/b/c"\\\n'], ['a/b/c"']),
        (r'(["\\]|x{2,3}|)+y', ['"\\"y', "xxy", "y"], ["xy"]),
        (r"[^x/]*", ['"\\\nü', ""], ["x", "/"]),
        (r"\S+ \D\W\w\d", ['"\\ a!a1'], ['" " 1!a1']),
        (r"^\x22\u{5c}\x{41}[\p{L}\x{42}\t]$", ['"\\Aé', '"\\A\t'], ['"\\A1']),
        ("a\tb\nc", ["a\tb\nc"], ["a b"]),
        (r".+?", ["a", '"', "\\\t"], ["\n", ""]),
        (r"[\[\]/]", ["[", "]", "/"], ["a"]),
    ],
)
def test_a_regular_expression(pattern: str, good: list[str], bad: list[str]) -> None:
    check(LLMatcher.grammar_from_regex(pattern), matching_in_json_object("input", pattern), good, bad)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: %json {"type": "string"}', "start: <tool>", 'start: A\nA: ~"b"', "%import python.X\nstart: X",
        "%ignore /x/\nstart: /a/", "start: /a/x", "start: /[a&&b]/", "start: /[a[b]]/", r"start: /\p{Z}/",
        "start: /[z-a]/", 'start: /(?i:a)"/', 'start: /a"^/', r'start: "\x"', r"start: /\u{110000}/",
    ],
)  # fmt: skip
def test_what_cannot_be_rewritten_is_named(grammar: str) -> None:
    with pytest.raises(InvalidParameterError, match="the grammar of a custom tool may only have"):
        in_json_object("input", grammar)
