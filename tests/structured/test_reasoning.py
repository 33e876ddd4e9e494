"""Reasoning before an answer: no more tokens than allowed, then the answer in its form, whatever a model would say."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.demo import demo_model_path
from octavo.errors import InvalidParameterError
from octavo.structured.llguidance_backend import LLGuidanceBackend
from octavo.structured_output import Reasoning, StructuralTag, StructuredOutput

BEGIN, END, STOP, CALL = 3, 4, 2, 5
ADDED = {"<|im_end|>": STOP, "<think>": BEGIN, "</think>": END, "<tool_call>": CALL, "</tool_call>": CALL + 1}
BACKEND = LLGuidanceBackend(
    (demo_model_path() / "tokenizer.json").read_text(encoding="utf-8"),
    num_tokens=2048,
    vocab_size=2100,  # padded
    added_tokens=ADDED,
    end_token_ids=[STOP],
)
CHOICE = StructuredOutput(choice=["yes", "no"])
FREE = StructuredOutput(reasoning=Reasoning())
CONSTRAINTS = {
    "choice": CHOICE,
    "regex": StructuredOutput(regex="(yes|no)"),
    "schema": StructuredOutput(json_schema={"enum": ["yes", "no"]}),
    "tags": StructuredOutput(
        tags=[StructuralTag(begin="<tool_call>", json_schema={"enum": [1]})], free_text=False, min_tags=1
    ),
}


def draw_answer(
    constraint: StructuredOutput, seed: int, num_tokens: int = 200, favored: int | None = None
) -> list[int]:
    """Tokens as a model with no idea would sample them under the mask; `favored` often, wherever it is allowed."""
    rng, matcher = random.Random(seed), BACKEND.compile(constraint)
    words = np.zeros((1, BACKEND.num_words), dtype=np.int32)  # [1, W]
    tokens: list[int] = []
    while len(tokens) < num_tokens and not matcher.is_complete:
        assert BACKEND.fill_masks([matcher], words) == [None]
        allowed = [token for token in range(BACKEND.num_words * 32) if words[0, token // 32] >> token % 32 & 1]
        assert max(allowed) < 2048
        token = favored if favored in allowed and rng.random() < 0.5 else rng.choice(allowed)
        if token == STOP:
            return tokens
        matcher.accept(token)
        tokens.append(token)
    return tokens


@given(st.sampled_from(sorted(CONSTRAINTS)), st.integers(0, 6), st.booleans(), st.integers(0, 1000))
def test_thoughts_end_in_time_and_the_answer_has_its_form(kind: str, budget: int, is_open: bool, seed: int) -> None:
    reasoning = Reasoning(is_open=is_open, max_tokens=budget)
    tokens = draw_answer(replace(CONSTRAINTS[kind], reasoning=reasoning), seed, favored=None if is_open else BEGIN)
    if not is_open and tokens[0] != BEGIN:
        answer = tokens
    else:
        inside = tokens if is_open else tokens[1:]
        assert inside.index(END) <= budget
        answer = inside[inside.index(END) + 1 :]
    assert answer
    assert END not in answer


@pytest.mark.parametrize("seed", range(20))
def test_no_answer_without_a_form_is_cut_short(seed: int) -> None:
    tokens = draw_answer(StructuredOutput(reasoning=Reasoning(is_open=True, max_tokens=3)), seed, 40, favored=CALL)
    assert tokens.index(END) <= 3
    assert CALL in tokens[tokens.index(END) :] or len(tokens) < 40  # anything may follow, calls too


def test_without_a_limit_thoughts_go_on() -> None:
    tokens = draw_answer(replace(CHOICE, reasoning=Reasoning(is_open=True)), seed=1, num_tokens=300)
    assert END not in tokens[:200]
    assert STOP not in tokens


def test_unopened_thoughts_may_be_left_out() -> None:
    answers = [draw_answer(StructuredOutput(reasoning=Reasoning(max_tokens=2)), seed, 30, BEGIN) for seed in range(20)]
    thinking = [tokens for tokens in answers if tokens and tokens[0] == BEGIN]
    assert 0 < len(thinking) < 20
    assert all(tokens[1:].index(END) <= 2 for tokens in thinking)


def test_a_budget_of_any_size_costs_nothing() -> None:
    assert draw_answer(StructuredOutput(reasoning=Reasoning(is_open=True, max_tokens=1 << 20)), 0, 20)


def test_a_tag_that_is_no_token_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match=r"reasoning\.begin='<hm>': must be a single token"):
        BACKEND.compile(replace(CHOICE, reasoning=Reasoning(begin="<hm>")))


@pytest.mark.parametrize(
    ("field", "value"), [("begin", ""), ("end", 3), ("is_open", 1), ("max_tokens", -1), ("max_tokens", 1 << 21)]
)
def test_bad_thoughts_are_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidParameterError, match=f"reasoning.{field}"):
        Reasoning(**{field: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidParameterError, match="reasoning"):
        StructuredOutput(choice=["a"], reasoning=3)  # type: ignore[arg-type]


def test_thoughts_alone_are_a_form() -> None:
    assert FREE.kind == "reasoning"
    assert replace(CHOICE, reasoning=Reasoning()).kind == "choice"
    assert json.loads(str(CONSTRAINTS["schema"].json_schema)) == {"enum": ["yes", "no"]}
