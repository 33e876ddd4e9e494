"""Every architecture and setting gives the logits and the greedy tokens of transformers, in float32.

The project promises 1e-4. On these models, whose logits reach 7, each side is within 2e-5 of its own float64 result.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.breadth import pick
from tests.models.paged import DTYPES, PagedRunner, load
from tests.models.tiny import MAX_LEN, TINY_MODELS, VOCAB_SIZE, TinyModel, saved
from torch.nn.utils.rnn import pad_sequence

from octavo.models.interfaces import CausalLM

TOLERANCE = 1e-4  # of logits that reach 7
Pair = tuple[Any, CausalLM, float]  # transformers' model, ours, and how far apart their logits may be


@pytest.fixture(scope="module", params=TINY_MODELS, ids=lambda case: case.name)
def pair(request: pytest.FixtureRequest) -> Pair:
    case: TinyModel = request.param
    folder, reference = saved(case.name)
    return reference, load(folder), case.tolerance


def random_tokens(length: int, seed: int) -> list[int]:
    # From 3 on: neither begin nor end tokens.
    tokens = torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed))
    return [int(token) for token in tokens]


def reference_logits(reference: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([tokens])).logits[0]
    return logits


def test_prefill_in_one_step(pair: Pair) -> None:
    reference, model, tolerance = pair
    tokens = random_tokens(41, seed=1)
    [logits] = PagedRunner(model).step({0: tokens})
    torch.testing.assert_close(logits, reference_logits(reference, tokens), atol=tolerance, rtol=0)


def test_chunks_and_single_tokens(pair: Pair) -> None:
    reference, model, tolerance = pair
    tokens = random_tokens(MAX_LEN, seed=2)
    runner = PagedRunner(model)
    end = pick(36, MAX_LEN)  # of single tokens
    pieces = [tokens[0:5], tokens[5:6], tokens[6:33], *([token] for token in tokens[33:end]), tokens[end:]]
    logits = torch.cat([runner.step({0: piece})[0] for piece in pieces if piece])
    torch.testing.assert_close(logits, reference_logits(reference, tokens), atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_near_to_the_truth_as_transformers(dtype: str, tmp_path: Path) -> None:
    case = next(case for case in TINY_MODELS if case.name == "qwen3-biases")
    reference = case.save(tmp_path)
    tokens = random_tokens(41, seed=3)
    truth = reference_logits(reference, tokens)
    [ours] = PagedRunner(load(tmp_path, dtype=dtype)).step({0: tokens})
    theirs = reference_logits(reference.to(DTYPES[dtype]), tokens).float()
    our_error, their_error = (ours - truth).square().mean(), (theirs - truth).square().mean()
    # Both round to the same dtype at about the same places; a factor of two is luck, more would be a fault.
    assert 0 < our_error < 4 * their_error


def test_greedy_tokens_of_a_mixed_batch(pair: Pair) -> None:
    reference, model, _ = pair
    prompts = [random_tokens(length, seed=length) for length in (1, 4, 23, 8)]
    generated = PagedRunner(model).generate(prompts, num_tokens=pick(5, 20))
    wholes = [torch.tensor(prompt + tokens) for prompt, tokens in zip(prompts, generated, strict=True)]
    with torch.inference_mode():  # one forward for all, padded on the right, where a causal model does not look
        logits = reference(pad_sequence(wholes, batch_first=True)).logits  # [R, T, V]
    for prompt, tokens, row in zip(prompts, generated, logits, strict=True):
        assert tokens == row[len(prompt) - 1 : len(prompt) + len(tokens) - 1].argmax(-1).tolist()
