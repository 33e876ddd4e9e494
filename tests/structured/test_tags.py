"""Parts with a form of their own inside free text: how often they come, what is around them, that none is broken."""

import json
import random
import re
from typing import Any

import pytest
from tests.breadth import pick
from tests.structured.support import backend_of, end_id, mask_of, random_answer, tokenizer_of

from octavo.structured_output import StructuralTag, StructuredOutput

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Bern"]}}, "required": ["city"]}
CLOSED = {**CITY, "additionalProperties": False}
TOKEN_CALL = StructuralTag(begin="<tool_call>\n", json_schema=CLOSED, end="\n</tool_call>", trigger="<tool_call>")
TEXT_CALL = StructuralTag(begin="<f=city>", json_schema=CLOSED, end="</f>", trigger="<f=")
TEXT_SUM = StructuralTag(begin="<f=sum>", grammar='start: /[0-9]{1,3}/ "+" /[0-9]/', end="</f>", trigger="<f=")
CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>|<f=city>(.*?)</f>|<f=sum>([0-9]{1,3}\+[0-9])</f>", re.DOTALL)


def calls_in(text: str) -> tuple[list[Any], str]:
    """Return what the tags of an answer hold, and the text around them."""
    found = [json.loads(a or b) if a or b else c for a, b, c in CALL.findall(text)]
    return found, CALL.sub("|", text)


def eager(family: str, texts: list[str]) -> Any:
    """Return a choice that rather goes on in one of `texts`, or ends: tags should come about in free text at all."""
    tokenizer, _ = tokenizer_of(family)
    wanted = {token_id for text in texts for token_id in tokenizer.encode(text, add_special_tokens=False)}

    def choose(rng: random.Random, allowed: list[int]) -> int:
        if end_id(family) in allowed and rng.random() < 0.05:
            return end_id(family)
        hits = [token_id for token_id in allowed if token_id in wanted]
        return rng.choice(hits if hits and rng.random() < 0.7 else allowed)

    return choose


@pytest.mark.parametrize("tags", [[TOKEN_CALL], [TEXT_CALL, TEXT_SUM]])
@pytest.mark.parametrize(("low", "high"), [(1, 1), (1, 3), (2, 2), (3, None), (0, 2)])
def test_nothing_but_tags(tags: list[StructuralTag], low: int, high: int | None) -> None:
    constraint = StructuredOutput(tags=tags, free_text=False, min_tags=low, max_tags=high, separator="; ")
    for seed in range(pick(3, 12)):
        text = random_answer("demo", constraint, seed)
        assert text is not None
        calls, around = calls_in(text)
        assert low <= len(calls) <= (len(calls) if high is None else high)
        assert around == "; ".join("|" * len(calls))
        assert all(isinstance(call, str) or call["city"] in ("Rome", "Bern") for call in calls)


@pytest.mark.parametrize(("tags", "trigger"), [([TOKEN_CALL], "<tool_call>"), ([TEXT_CALL, TEXT_SUM], "<f=")])
@pytest.mark.parametrize(("low", "high"), [(1, 1), (1, 2), (0, 1), (0, None), (2, None)])
def test_tags_in_free_text(tags: list[StructuralTag], trigger: str, low: int, high: int | None) -> None:
    constraint = StructuredOutput(tags=tags, min_tags=low, max_tags=high)
    choose = eager("demo", [trigger, "</f>"])
    texts = [random_answer("demo", constraint, seed, choose=choose, max_tokens=900) for seed in range(pick(8, 25))]
    ended = [text for text in texts if text is not None]
    assert len(ended) >= pick(2, 5)
    for text in ended:
        calls, around = calls_in(text)
        assert trigger not in around, "every beginning is a whole tag"
        assert low <= len(calls) <= (len(calls) if high is None else high)
        if high is not None and len(calls) == high:
            assert around.endswith("|"), "with the last tag the answer ends"


def test_no_end_before_the_tags_have_come() -> None:
    constraint = StructuredOutput(tags=[TOKEN_CALL], min_tags=1)
    backend, (tokenizer, _) = backend_of("demo"), tokenizer_of("demo")
    matcher = backend.compile(constraint)
    for token_id in tokenizer.encode("Let me see.", add_special_tokens=False):
        assert end_id("demo") not in mask_of(backend, matcher)
        matcher.accept(token_id)
    for token_id in tokenizer.encode('<tool_call>\n{"city": "Rome"}\n</tool_call>', add_special_tokens=False):
        assert end_id("demo") not in mask_of(backend, matcher)
        matcher.accept(token_id)
    assert end_id("demo") in mask_of(backend, matcher)


def test_two_ways_to_begin() -> None:
    other = StructuralTag(begin="<tool_response>", grammar='start: "x"')
    constraint = StructuredOutput(tags=[TOKEN_CALL, TEXT_SUM, other], free_text=False, min_tags=1, max_tags=1)
    beginnings = {
        text.partition(">")[0] for text in (random_answer("demo", constraint, seed) or "" for seed in range(40))
    }
    assert beginnings == {"<tool_call", "<f=sum", "<tool_response"}


def test_a_tag_may_begin_with_its_content() -> None:
    constraint = StructuredOutput(
        tags=[StructuralTag(json_schema=CLOSED)], free_text=False, min_tags=1, max_tags=2, separator=";"
    )
    for seed in range(10):
        text = random_answer("demo", constraint, seed)
        assert text is not None
        assert [json.loads(part)["city"] in ("Rome", "Bern") for part in text.split(";")]
