"""The public `ModelRunner`: logits and KV handles for programs with their own scheduling."""

import gc

import pytest
import torch

from octavo.errors import InvalidParameterError, OutOfBlocksError, PromptTooLongError
from octavo.model_runner import ModelRunner


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ModelRunner("demo", dtype="float32", block_size=8, num_kv_blocks=64, max_model_len=256)


def test_snippet_of_the_readme(runner: ModelRunner) -> None:
    input_tokens = runner.tokenize("Hello, world!")
    output = runner.run_model(input_tokens)
    assert output.logits.shape == (len(input_tokens), runner.run_model([0]).logits.shape[1])
    assert runner.detokenize(input_tokens) == "Hello, world!"


def test_a_handle_continues_where_it_ended(runner: ModelRunner) -> None:
    ids = runner.tokenize("What is Octavo, and what is a block of memory?")
    whole = runner.run_model(ids).logits
    for cut in (1, 8, len(ids) - 1):
        head = runner.run_model(torch.tensor([ids[:cut]]))
        tail = runner.run_model(ids[cut:], head.past_key_values)
        assert torch.equal(torch.cat([head.logits, tail.logits]), whole)


def test_a_handle_may_be_continued_twice(runner: ModelRunner) -> None:
    ids = runner.tokenize("One two three")
    past = runner.run_model(ids).past_key_values
    first, second = (runner.run_model([branch], past) for branch in (5, 6))
    again = runner.run_model([7], first.past_key_values).logits
    assert torch.equal(first.logits, runner.run_model([*ids, 5]).logits[-1:])
    assert torch.equal(second.logits, runner.run_model([*ids, 6]).logits[-1:])
    assert torch.equal(again, runner.run_model([*ids, 5, 7]).logits[-1:])


def test_a_batch_is_its_members(runner: ModelRunner) -> None:
    texts = ["a", "a much longer sentence about books", "x y"]
    batch = runner.run_model_batch([runner.tokenize(text) for text in texts])
    for text, output in zip(texts, batch, strict=True):
        assert torch.equal(output.logits, runner.run_model(runner.tokenize(text)).logits)
    assert runner.run_model_batch([]) == []


def test_memory_is_free_when_nobody_holds_a_handle(runner: ModelRunner) -> None:
    gc.collect()
    free = runner._pool.num_free
    held = [runner.run_model([1] * 9) for _ in range(3)]
    assert runner._pool.num_free == free - 6
    del held
    gc.collect()
    assert runner._pool.num_free == free
    runner._pool.check_integrity()


def test_bad_input_names_the_field(runner: ModelRunner) -> None:
    with pytest.raises(InvalidParameterError, match="input_ids"):
        runner.run_model([])
    with pytest.raises(InvalidParameterError, match="input_ids"):
        runner.run_model([10**6])
    with pytest.raises(InvalidParameterError, match="past_key_values"):
        runner.run_model_batch([[1], [2]], [None])
    with pytest.raises(PromptTooLongError, match="256 tokens"):
        runner.run_model([1] * 257)


def test_too_many_handles_are_a_typed_error(runner: ModelRunner) -> None:
    gc.collect()
    held = [runner.run_model([1] * 250) for _ in range(2)]
    with pytest.raises(OutOfBlocksError, match="32 KV blocks requested, 0 free"):
        runner.run_model([1] * 250)
    del held
    runner.run_model([1] * 250)
