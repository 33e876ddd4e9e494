"""After the last layer's attention, only tokens whose hidden state is needed are computed."""

from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.attention.metadata import ForwardBatch
from octavo.inputs import Prompt
from octavo.models.interfaces import CausalLM, IntermediateTensors
from octavo.worker.graph import StepGraph

PROMPTS: list[Prompt] = [{"prompt_token_ids": list(range(100, 100 + length))} for length in (41, 3)]


class Watched:
    """Every step that is computed: its tokens, and the rows that came back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[int, int]] = []
        for owner, name in ((CausalLM, "run_stage"), (StepGraph, "run")):
            self._watch(monkeypatch, owner, name)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        run = getattr(owner, name)

        def watched(step: Any, batch: ForwardBatch, *arguments: Any) -> IntermediateTensors:
            result: IntermediateTensors = run(step, batch, *arguments)
            self.steps.append((len(batch.input_ids), len(result.hidden)))
            return result

        monkeypatch.setattr(owner, name, watched)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def generate(watched: Watched, enforce_eager: bool, **metadata: Any) -> list[Any]:
    """Serve the prompts in steps of 16 tokens; what the start computed is forgotten."""
    llm = LLM("demo", max_num_batched_tokens=16, num_kv_blocks=64, enforce_eager=enforce_eager)
    watched.steps.clear()
    outputs = llm.generate(
        PROMPTS, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, **metadata), use_tqdm=False
    )
    llm.exit()
    return [(output.outputs[0].token_ids, output.prompt_logprobs) for output in outputs]


EAGER = pytest.mark.parametrize("enforce_eager", [False, True])


@EAGER
def test_prompts_bring_back_their_last_token(watched: Watched, enforce_eager: bool) -> None:
    generate(watched, enforce_eager)
    prefills = [(num_tokens, num_rows) for num_tokens, num_rows in watched.steps if num_tokens > 2]
    assert sum(num_tokens for num_tokens, _ in prefills) >= 44
    assert all(num_rows <= len(PROMPTS) for _, num_rows in prefills)
    assert all(num_rows >= 1 for _, num_rows in watched.steps)


@EAGER
def test_log_probabilities_of_a_prompt_want_all(watched: Watched, enforce_eager: bool) -> None:
    plain = generate(watched, enforce_eager, logprobs=1)
    rated = generate(watched, enforce_eager, logprobs=1, prompt_logprobs=1)
    assert [tokens for tokens, _ in plain] == [tokens for tokens, _ in rated]
    assert all(len(prompt_logprobs) == length for (_, prompt_logprobs), length in zip(rated, (41, 3), strict=True))
    prefills = [(num_tokens, num_rows) for num_tokens, num_rows in watched.steps if num_tokens > 2]
    assert prefills
    assert all(num_tokens == num_rows for num_tokens, num_rows in prefills)
