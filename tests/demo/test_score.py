"""The bundled weights do what their card says, and the one-pass score agrees with decoding token by token."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.breadth import pick
from tokenizers import Tokenizer
from tools.demo_model.card import TASKS as DESCRIBED
from tools.demo_model.checkpoint import load_checkpoint
from tools.demo_model.corpus import TASKS, held_out
from tools.demo_model.example import Example
from tools.demo_model.qwen3 import Qwen3
from tools.demo_model.score import correct, mean, scores
from tools.demo_model.template import question_and_answer
from transformers import AutoModelForCausalLM

from octavo.demo import demo_model_path

LEAST_MEAN = 0.9
MAX_NEW_TOKENS = 60


@pytest.fixture(scope="module")
def model() -> Qwen3:
    return load_checkpoint(demo_model_path())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)


def test_held_out_answers_are_right(model: Qwen3, tokenizer: Tokenizer) -> None:
    assert mean(scores(model, tokenizer, pick(5, 10))) >= LEAST_MEAN


def test_an_untrained_model_scores_nothing(model: Qwen3, tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    assert not any(correct(Qwen3(model.shape), tokenizer, held_out("add", 20, seed=1)))


@pytest.mark.parametrize("task", ["add", "json", "tool_call"])
def test_score_is_what_greedy_decoding_writes(task: str, model: Qwen3, tokenizer: Tokenizer, reference: Any) -> None:
    examples = held_out(task, pick(1, 2), seed=2)
    decoded = [greedy(reference, tokenizer, example) == question_and_answer(example)[1] for example in examples]
    assert decoded == list(correct(model, tokenizer, examples))


def greedy(reference: Any, tokenizer: Tokenizer, example: Example) -> str:
    """What `transformers` writes after the example's prompt, up to the end mark."""
    ids = torch.tensor([tokenizer.encode(question_and_answer(example)[0]).ids])  # [1, T]
    out = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        temperature=None,
        top_k=None,
        top_p=None,
        max_new_tokens=MAX_NEW_TOKENS,
    )
    return str(tokenizer.decode(out[0, ids.shape[1] :].tolist(), skip_special_tokens=False))


def test_the_card_describes_each_task() -> None:
    card = Path(demo_model_path() / "README.md").read_text()
    assert set(DESCRIBED) == set(TASKS)
    assert all(f"| {task} |" in card for task in TASKS)
