"""Masks: whatever is drawn from them has the form, all that has the form can be drawn, and it ends where it may."""

import json
import random
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tests.breadth import pick
from tests.structured.support import (
    END_TEXT,
    SCHEMAS,
    backend_of,
    end_id,
    is_valid,
    mask_of,
    parse,
    random_answer,
    tokenizer_of,
)

from octavo.errors import GrammarError, GrammarTooComplexError, InvalidParameterError, UserError
from octavo.structured.llguidance_backend import LLGuidanceBackend
from octavo.structured_output import StructuralTag, StructuredOutput

FAMILIES = list(END_TEXT)
ONE: dict[str, Any] = {"free_text": False, "min_tags": 1, "max_tags": 1}
ATOMS = st.sampled_from(["a", "b", "ab", "[a-c]", "[0-9]", " ", "é", r"\d", r"\."])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: (
        st.tuples(inner, inner).map("".join)
        | st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})")
        | st.tuples(inner, st.sampled_from(["?", "{1,3}", "{2}"])).map(lambda pair: f"(?:{pair[0]}){pair[1]}")
    ),
    max_leaves=6,
)
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12)


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("family", ["demo", "byte_level"])
def test_what_is_drawn_is_valid_json(family: str, name: str) -> None:
    for seed in range(pick(10, 25)):
        text = random_answer(family, StructuredOutput(json_schema=SCHEMAS[name]), seed)
        assert text is not None
        assert is_valid(parse(text), SCHEMAS[name]), text


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"a":1,"b":[2]}', True),
        ('{"a": 1, "b": [2]}', True),
        ('{\n  "a": 1,\n  "b": [\n    2\n  ]\n}', True),
        ('{\r\n\t"a": 1,\r\n\t"b": [\r\n\t\t2\r\n\t]\r\n}', True),
        ('{"a":  1', False),
        ("{\n\n", False),
        ("{ \n", False),
        ('{"a": 1\t', False),
    ],
)
def test_white_space_is_what_a_formatter_writes(text: str, fits: bool) -> None:
    schema = {"properties": {"a": {"type": "integer"}, "b": {"type": "array"}}, "required": ["a", "b"]}
    matcher = backend_of("byte_level").compile(StructuredOutput(json_schema={"type": "object", **schema}))
    tokens = tokenizer_of("byte_level")[0].encode(text, add_special_tokens=False)
    assert all(map(matcher.matcher.consume_token, tokens)) == fits


def test_the_validator_sees_what_is_wrong() -> None:
    wrong: list[tuple[str, Any]] = [
        ("person", {"name": "x"}),
        ("person", {"name": "", "age": 5}),
        ("person", {"name": "x", "age": 151}),
        ("person", {"name": "x", "age": True}),
        ("person", {"name": "x", "age": 5, "mood": "bad"}),
        ("person", {"name": "x", "age": 5, "more": 1}),
        ("list", [1]),
        ("list", [1, 2]),
        ("union", "ab-1234"),
        ("union", {"ok": 1}),
        ("tree", {"root": {"left": "a", "right": "c"}}),
    ]
    for name, value in wrong:
        assert not is_valid(value, SCHEMAS[name]), (name, value)


@pytest.mark.parametrize("family", ["demo", "byte_level"])
def test_any_object(family: str) -> None:
    """A free object may go on for ever, so its end is preferred wherever it may come."""

    def close(rng: random.Random, allowed: list[int]) -> int:
        tokenizer, _ = tokenizer_of(family)
        closing = [token_id for token_id in allowed if tokenizer.token_bytes(token_id) in (b"}", b'"', b"]")]
        return rng.choice(closing if closing and rng.random() < 0.8 else allowed)

    seeds = range(pick(15, 30))
    texts = [random_answer(family, StructuredOutput(json_object=True), seed, choose=close) for seed in seeds]
    values = [parse(text) for text in texts if text is not None]
    assert len(values) > len(seeds) * 2 // 3
    assert any(value for value in values)
    assert all(isinstance(value, dict) for value in values)


@settings(max_examples=pick(25, 60), deadline=None)
@given(pattern=PATTERNS, seed=st.integers(0, 2**32), family=st.sampled_from(FAMILIES))
def test_what_is_drawn_matches_the_pattern(pattern: str, seed: int, family: str) -> None:
    text = random_answer(family, StructuredOutput(regex=pattern), seed)
    assert text is not None
    assert re.fullmatch(pattern, text)


@settings(max_examples=pick(20, 60), deadline=None)
@given(choices=st.lists(TEXTS, min_size=1, max_size=6), seed=st.integers(0, 2**32))
def test_what_is_drawn_is_one_of_the_choices(choices: list[str], seed: int) -> None:
    assert random_answer("demo", StructuredOutput(choice=choices), seed) in choices


@settings(max_examples=pick(15, 40), deadline=None)
@given(choices=st.lists(TEXTS, min_size=1, max_size=6), index=st.integers(0, 5))
def test_every_choice_can_be_said(choices: list[str], index: int) -> None:
    """The mask must not take away what has the form: each token of a choice's own spelling is allowed in its turn."""
    tokenizer, _ = tokenizer_of("demo")
    backend, chosen = backend_of("demo"), choices[index % len(choices)]
    matcher = backend.compile(StructuredOutput(choice=choices))
    for token_id in tokenizer.encode(chosen, add_special_tokens=False):
        assert token_id in mask_of(backend, matcher)
        matcher.accept(token_id)
    assert matcher.is_complete or end_id("demo") in mask_of(backend, matcher)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_end_is_allowed_exactly_where_the_form_may_be_complete(family: str) -> None:
    backend, (tokenizer, _) = backend_of(family), tokenizer_of(family)
    matcher = backend.compile(StructuredOutput(regex="ab?c{0,2}"))
    said = ""
    for piece in "abcc":
        allowed = mask_of(backend, matcher)
        assert (end_id(family) in allowed) == (re.fullmatch("ab?c{0,2}", said) is not None)
        matcher.accept(next(id_ for id_ in allowed if tokenizer.token_bytes(id_) == piece.encode()))
        said += piece
    assert matcher.is_complete


@pytest.mark.parametrize("family", FAMILIES)
def test_special_tokens_and_padding_are_never_text(family: str) -> None:
    backend, (tokenizer, _) = backend_of(family), tokenizer_of(family)
    allowed = set(mask_of(backend, backend.compile(StructuredOutput(regex="(.|\n)*"))))
    assert allowed & tokenizer.special_token_ids == {end_id(family)}
    assert max(allowed) < tokenizer.vocab_size
    assert len(allowed) > 150


@pytest.mark.parametrize("length", [{"minLength": 4000}, {"maxLength": 2**31 - 1}])
def test_a_long_string_is_counted_to_its_end(length: dict[str, int]) -> None:
    backend, (tokenizer, _) = backend_of("byte_level"), tokenizer_of("byte_level")
    matcher = backend.compile(StructuredOutput(json_schema={"type": "string", **length}))
    matcher.accept(tokenizer.encode('"', add_special_tokens=False)[0])
    letters = tokenizer.encode("aé\\\\", add_special_tokens=False)
    for number in range(4000):
        if number % 3 == 0:
            mask_of(backend, matcher)
        for token_id in letters[:1] if number % 3 else letters:
            matcher.accept(token_id)
    assert tokenizer.encode('"', add_special_tokens=False)[0] in mask_of(backend, matcher)


@pytest.mark.parametrize("family", FAMILIES)
def test_text_that_reads_like_a_special_token_is_made_of_ordinary_tokens(family: str) -> None:
    backend, (tokenizer, library) = backend_of(family), tokenizer_of(family)
    for token in library.get_added_tokens_decoder().values():
        if not (token.special or token.content.startswith("<")):
            continue
        text = f"a {token.content} b"
        quoted = json.dumps(text)
        said = {
            StructuredOutput(choice=[text]): text,
            StructuredOutput(choice=[token.content]): token.content,
            StructuredOutput(json_schema={"const": text}): quoted,
            StructuredOutput(regex=re.escape(text)): text,
            StructuredOutput(grammar=f"start: {quoted}"): text,
            StructuredOutput(grammar=f"root ::= {quoted}"): text,
            StructuredOutput(
                tags=[StructuralTag(begin="[", json_schema={"const": text}, end="]")], **ONE
            ): f"[{quoted}]",
        }
        for constraint, expected in said.items():
            assert random_answer(family, constraint, 0) == expected
            forced = backend.compile(constraint).forced()
            assert tokenizer.special_token_ids.isdisjoint(forced)
        schema = {"type": "object", "properties": {text: {"enum": [text]}}, "required": [text]}
        answer = random_answer(family, StructuredOutput(json_schema={**schema, "additionalProperties": False}), 0)
        assert answer is not None
        assert parse(answer) == {text: text}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_forced_text_is_spelled_as_the_library_would(family: str) -> None:
    backend, (tokenizer, library) = backend_of(family), tokenizer_of(family)
    spelling = LLTokenizer(library.to_str(), slices=[])
    rng = random.Random(0)
    ordinary = [token_id for token_id in range(tokenizer.vocab_size) if not spelling.is_special_token(token_id)]
    for _ in range(pick(60, 200)):
        text = spelling.decode_bytes(rng.choices(ordinary, k=4)).decode(errors="ignore")
        if text:
            forced = backend.compile(StructuredOutput(choice=[text])).forced()
            assert forced == spelling.tokenize_str(text)[: len(forced)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_library_and_our_detokenizer_agree_on_every_token(family: str) -> None:
    """The form is held over the library's bytes, and what the user reads are ours."""
    backend, (tokenizer, _) = backend_of(family), tokenizer_of(family)
    for token_id in range(tokenizer.vocab_size):
        if token_id not in tokenizer.special_token_ids and tokenizer.token_bytes(token_id) != b"\xff":  # never in UTF-8
            assert backend.bytes_of(token_id) == tokenizer.token_bytes(token_id), token_id


def test_masks_made_together_are_those_made_alone() -> None:
    backend, rng = backend_of("demo"), random.Random(0)
    constraints = [StructuredOutput(json_schema=schema) for schema in SCHEMAS.values()] + [
        StructuredOutput(regex="[a-z ]+")
    ]
    matchers = [backend.compile(constraint) for constraint in constraints]
    for _ in range(6):
        words = np.zeros((len(matchers), backend.num_words), dtype=np.int32)
        assert backend.fill_masks(matchers, words) == [None] * len(matchers)
        for matcher, row in zip(matchers, words, strict=True):
            allowed = mask_of(backend, matcher)
            assert np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0].tolist() == allowed
            matcher.accept(rng.choice([id_ for id_ in allowed if id_ != end_id("demo")]))


def test_matchers_of_one_grammar_do_not_move_one_another() -> None:
    backend = backend_of("demo")
    grammar = backend.compile(StructuredOutput(choice=["aab", "abb"]))
    first, second = grammar.copy(), grammar.copy()
    start = mask_of(backend, second)
    while not first.is_complete:
        first.accept(mask_of(backend, first)[0])
    assert mask_of(backend, second) == mask_of(backend, grammar.copy()) == start


def test_a_token_that_was_not_allowed_is_an_error() -> None:
    backend = backend_of("demo")
    matcher = backend.compile(StructuredOutput(regex="[0-9]{3}"))
    with pytest.raises(GrammarError, match="does not match the grammar"):
        matcher.accept(tokenizer_of("demo")[0].encode("x")[0])


@pytest.mark.parametrize(
    "constraint", [StructuredOutput(json_schema={"$ref": "#"}), StructuredOutput(grammar="start: start")]
)
def test_a_form_that_nothing_can_have(constraint: StructuredOutput) -> None:
    with pytest.raises(InvalidParameterError, match="no output can satisfy it"):
        backend_of("demo").compile(constraint)


def test_the_empty_answer_is_one() -> None:
    assert random_answer("demo", StructuredOutput(regex="a{0}"), seed=0) == ""


def test_a_form_over_the_limits() -> None:
    with pytest.raises(GrammarTooComplexError, match="json_schema: fuel exhausted"):
        backend_of("demo").compile(StructuredOutput(json_schema={"type": "integer", "multipleOf": 999_999_999}))


@pytest.mark.full  # three seconds until the library's limit
def test_an_answer_over_the_limits() -> None:
    backend = backend_of("demo")
    matcher = backend.compile(StructuredOutput(regex="((a{1000}){1000}){1000}"))
    [token_id] = tokenizer_of("demo")[0].encode("a")
    assert token_id in mask_of(backend, matcher)
    with pytest.raises(GrammarTooComplexError, match="too many"):
        matcher.accept(token_id)


def test_a_tokenizer_that_the_library_cannot_read() -> None:
    with pytest.raises(UserError, match="this model's tokenizer"):
        LLGuidanceBackend("{}", num_tokens=5, vocab_size=5, added_tokens={}, end_token_ids=[])


def test_a_tag_is_begun_by_its_special_token() -> None:
    """As text, `<tool_call>` would be five tokens: the model knows the one."""
    tag = StructuralTag(begin="<tool_call>", json_schema={"enum": [1]}, end="</tool_call>")
    backend, (_, library) = backend_of("demo"), tokenizer_of("demo")
    matcher = backend.compile(StructuredOutput(tags=[tag], free_text=False, min_tags=1, max_tags=1))
    assert mask_of(backend, matcher) == [library.token_to_id("<tool_call>")]
