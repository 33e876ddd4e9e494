"""How many held-out answers the model gives exactly, each up to its end mark."""

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
    """The prompt's and the answer's tokens."""
    prompt, answer = question_and_answer(example, is_thinking=is_thinking)
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids for text in (prompt, answer))  # type: ignore[return-value]


def padded(rows: list[list[int]]) -> Tensor:
    """Rows of unequal length as one tensor [B, T], zeros behind: a causal model does not see them."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


@torch.inference_mode()
def correct(
    model: Qwen3, tokenizer: Tokenizer, examples: list[Example], *, is_thinking: bool = False
) -> Iterator[bool]:
    """For each example whether greedy decoding writes exactly the answer.

    One pass over prompt and answer decides it: greedy decoding writes the answer if and only if, given the answer so
    far, each next token of it has the highest logit.
    """
    for first in range(0, len(examples), CHUNK):
        pairs = [encoded(tokenizer, example, is_thinking=is_thinking) for example in examples[first : first + CHUNK]]
        hidden = model.hidden(padded([prompt + answer for prompt, answer in pairs]))  # [B, T, D]
        for row, (prompt, answer) in enumerate(pairs):
            at = len(prompt) - 1
            best = model.logits(hidden[row, at : at + len(answer)]).argmax(-1)  # [answer]
            yield best.tolist() == answer


def scores(model: Qwen3, tokenizer: Tokenizer, count: int, *, is_thinking: bool = False) -> dict[str, tuple[int, int]]:
    """For each task the number of right answers and of questions asked, `count` of them or as many as there are."""
    out = {}
    for task in TASKS:
        examples = sorted(held_out(task, count, SEED), key=lambda example: len(str(example.tools + example.messages)))
        out[task] = (sum(correct(model, tokenizer, examples, is_thinking=is_thinking)), len(examples))
    return out


def mean(by_task: dict[str, tuple[int, int]]) -> float:
    """The mean over tasks of the share of right answers."""
    return sum(right / asked for right, asked in by_task.values()) / len(by_task)


def in_words(by_task: dict[str, tuple[int, int]]) -> str:
    """One line for a log."""
    return f"mean {mean(by_task):.1%} | " + " ".join(
        f"{task} {right / asked:.1%}" for task, (right, asked) in by_task.items()
    )
