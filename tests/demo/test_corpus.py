"""The training text: the same for a seed, right in every answer, and without the held-out items."""

import itertools
import json
import random

import pytest
from tokenizers import Tokenizer
from tools.demo_model import arithmetic, records, sequences
from tools.demo_model.batches import Marks, Packer, written_by_model
from tools.demo_model.corpus import TASKS, documents, draw, held_out
from tools.demo_model.example import CLOSED_TASKS, is_held_out

from octavo.demo import demo_model_path

OPEN_TASKS = sorted(set(TASKS) - CLOSED_TASKS)
NUM_DOCUMENTS = 3000


def test_a_seed_fixes_the_text() -> None:
    first, again, other = (list(itertools.islice(documents(seed), 50)) for seed in (7, 7, 8))
    assert first == again
    assert first != other


@pytest.mark.parametrize("task", OPEN_TASKS)
def test_training_never_draws_what_is_held_out(task: str) -> None:
    rng = random.Random(3)
    drawn = [draw(rng, {task: 1.0}) for _ in range(2000)]
    assert not any(is_held_out(task, example.key) for example in drawn)
    questions = held_out(task, 50, seed=3)
    assert len(questions) >= 30
    assert all(is_held_out(task, example.key) for example in questions)
    assert not {example.key for example in questions} & {example.key for example in drawn}


def test_held_out_sums_are_nowhere_in_the_text() -> None:
    text = "".join(itertools.islice(documents(5), NUM_DOCUMENTS))
    answers = [f"\n{example.messages[-1]['content']}<" for example in held_out("add", 500, seed=5)]
    assert not [answer for answer in answers if answer in text]


def test_sums_and_differences_are_right() -> None:
    rng = random.Random(1)
    for generate in (arithmetic.addition, arithmetic.subtraction, arithmetic.multiplication):
        for _ in range(200):
            left, right = generate(rng).messages[-1]["content"].split(" = ")
            first, sign, second = left.split()
            a, b = int(first), int(second)
            assert int(right) == {"+": a + b, "-": a - b, "*": a * b}[sign]


def test_the_worked_sum_ends_in_the_sum() -> None:
    assert arithmetic.sum_steps(58, 7).splitlines() == ["ones: 8 + 7 = 15", "tens: 5 + 0 + 1 = 6"]


def test_sorted_lists_are_sorted() -> None:
    rng = random.Random(1)
    for _ in range(200):
        example = sequences.sorting(rng)
        numbers = [int(number) for number in example.messages[-1]["content"].split(", ")]
        assert numbers == sorted(numbers, reverse=example.key.startswith("down"))


def test_records_are_json() -> None:
    rng = random.Random(1)
    for _ in range(100):
        assert len(json.loads(records.json_writing(rng).messages[-1]["content"])) >= 2


def test_loss_falls_on_answers_and_on_plain_text_only() -> None:
    tokenizer = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    batch = Packer(tokenizer, seed=1).batch(step=0, num_rows=4, length=512)
    written = tokenizer.decode(batch.targets[batch.has_loss].tolist(), skip_special_tokens=False)
    told = tokenizer.decode(batch.targets[~batch.has_loss].tolist(), skip_special_tokens=False)
    assert "<|im_end|>" in written
    assert "<|im_start|>" not in written
    assert "<|im_start|>user" in told
    assert batch.ids[:, 1:].equal(batch.targets[:, :-1])


def test_in_a_page_of_sums_only_the_results_carry_loss() -> None:
    tokenizer = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    ids = tokenizer.encode("12 + 30 = 42\n7 - 5 = 2<|endoftext|>").ids
    written = written_by_model(ids, Marks.of(tokenizer))
    kept = [token for token, is_kept in zip(ids, written, strict=True) if is_kept]
    assert tokenizer.decode(kept, skip_special_tokens=False) == " 42\n 2<|endoftext|>"


def test_a_step_draws_the_same_rows_again() -> None:
    tokenizer = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    first, again = (Packer(tokenizer, seed=1).batch(step=9, num_rows=2, length=128) for _ in range(2))
    assert first.ids.equal(again.ids)
    assert first.has_loss.equal(again.has_loss)
