"""Exact-match accuracy on held-out items, including the end token."""

from collections.abc import Iterator

import torch
from tokenizers import Tokenizer
from tools.demo_model.corpus import TASKS, held_out
from tools.demo_model.example import Example
from tools.demo_model.qwen3 import Qwen3
from tools.demo_model.template import question_and_answer
from torch import Tensor

SEED = 2025
CHUNK = 64


def encoded(tokenizer: Tokenizer, example: Example, *, is_thinking: bool) -> tuple[list[int], list[int]]:
    """Return the tokens of prompt and answer."""
    prompt, answer = question_and_answer(example, is_thinking=is_thinking)
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids for text in (prompt, answer))  # type: ignore[return-value]  # two


def padded(rows: list[list[int]]) -> Tensor:
    """Return rows as one tensor [B, T], zero-padded at the end, which a causal model ignores."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


@torch.inference_mode()
def correct(
    model: Qwen3, tokenizer: Tokenizer, examples: list[Example], *, is_thinking: bool = False
) -> Iterator[bool]:
    """Yield for each example whether greedy decoding generates exactly the answer.

    One pass over prompt and answer decides it: greedy decoding generates the answer if and only if each of its tokens
    has the highest logit given the tokens before it.
    """
    for first in range(0, len(examples), CHUNK):
        pairs = [encoded(tokenizer, example, is_thinking=is_thinking) for example in examples[first : first + CHUNK]]
        hidden = model.hidden(padded([prompt + answer for prompt, answer in pairs]))  # [B, T, D]
        for row, (prompt, answer) in enumerate(pairs):
            at = len(prompt) - 1
            best = model.logits(hidden[row, at : at + len(answer)]).argmax(-1)  # [answer]
            yield best.tolist() == answer


def scores(model: Qwen3, tokenizer: Tokenizer, count: int, *, is_thinking: bool = False) -> dict[str, tuple[int, int]]:
    """Return for each task the numbers of correct answers and of questions, at most `count`."""
    out = {}
    for task in TASKS:
        examples = sorted(held_out(task, count, SEED), key=lambda example: len(str(example.tools + example.messages)))
        out[task] = (sum(correct(model, tokenizer, examples, is_thinking=is_thinking)), len(examples))
    return out


def mean(by_task: dict[str, tuple[int, int]]) -> float:
    """Return the mean accuracy over tasks."""
    return sum(right / asked for right, asked in by_task.values()) / len(by_task)


def in_words(by_task: dict[str, tuple[int, int]]) -> str:
    """Return one line for the log."""
    return f"mean {mean(by_task):.1%} | " + " ".join(
        f"{task} {right / asked:.1%}" for task, (right, asked) in by_task.items()
    )
