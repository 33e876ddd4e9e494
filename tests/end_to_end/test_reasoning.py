"""Budgets of reasoning by whole engines: kept to the token, and the same bytes alone, in a batch and when preempted."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.breadth import pick
from tests.end_to_end.conftest import GetCheckpoint, open_llm
from tests.end_to_end.support import answer

from octavo import LLM, Reasoning, SamplingParams, StructuredOutput

END = 4  # </think> of the demo model
PROMPT = "<|im_start|>user\nWhat is 123 + 456?<|im_end|>\n<|im_start|>assistant\n<think>\n"


@pytest.fixture(scope="module", params=pick(["random"], ["trained", "random"]))
def llm(request: pytest.FixtureRequest, checkpoint: GetCheckpoint) -> Iterator[LLM]:
    """The demo model with few blocks, trained and with random weights."""
    weights: dict[str, Any] = {"random": {"load_format": "dummy"}, "trained": {}}[request.param]
    with open_llm(checkpoint, "demo", max_model_len=128, num_kv_blocks=64, **weights) as made:
        yield made
        made.engine.check_integrity()


def params(budget: int, constraint: StructuredOutput | None = None, **options: Any) -> SamplingParams:
    reasoning = Reasoning(is_open=True, max_tokens=budget)
    if constraint is None:
        constraint = StructuredOutput(reasoning=reasoning)
    else:
        constraint = StructuredOutput(choice=constraint.choice, reasoning=reasoning)
    return SamplingParams(**{"max_tokens": 40, "structured_output": constraint, **options})


def test_budgets_and_forms_are_kept_in_any_company(llm: LLM) -> None:
    choice = StructuredOutput(choice=["yes", "no"])
    wanted = [
        params(budget, constraint, seed=budget, temperature=temperature)
        for budget in pick((0, 3), (0, 1, 3, 9))
        for constraint in (None, choice)
        for temperature in (0.0, 2.0)
    ]
    free = SamplingParams(max_tokens=30, seed=5)
    together = llm.generate([PROMPT] * (len(wanted) + 4), [*wanted, *[free] * 4], use_tqdm=False)
    assert any(output.metrics.num_preemptions for output in together)
    for output, asked in zip(together, wanted, strict=False):
        assert asked.structured_output is not None
        assert asked.structured_output.reasoning is not None
        budget = asked.structured_output.reasoning.max_tokens
        assert budget is not None
        sample = output.outputs[0]
        assert sample.token_ids.index(END) <= budget
        if asked.structured_output.choice:
            assert sample.text.rpartition("</think>")[2].strip() in ("yes", "no")
        alone = llm.generate([PROMPT], asked, use_tqdm=False)[0]
        assert answer(alone) == answer(output)
