"""Logprobs: of the raw distribution, ranked, ties to the lowest id, the same bits in any batch."""

import math

import pytest
import torch
from tests.sampling.support import sample, token_logprobs

from octavo.errors import RequestError
from octavo.sampling.logprobs import _keys, _likeliest, prompt_logprobs
from octavo.sampling_params import SamplingParams


def random_logits(num_rows: int, vocab_size: int) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 4


@pytest.mark.parametrize("vocab_size", [2, 17, 1000, 151_936])
def test_values_are_log_softmax(vocab_size: int) -> None:
    logits = random_logits(1, vocab_size)[0]
    exact = logits.double().log_softmax(-1)
    result = token_logprobs(logits, vocab_size // 2, min(20, vocab_size))
    assert result.token_ids[0] == vocab_size // 2
    assert result.token_ids[1:] == exact.argsort(descending=True)[:20].tolist()
    assert result.logprobs == pytest.approx(exact[result.token_ids].tolist(), rel=1e-6, abs=1e-6)
    assert result.rank == int((exact > exact[vocab_size // 2]).sum()) + 1


def test_equals_are_named_in_the_order_of_their_ids() -> None:
    logits = torch.tensor([0.0, 1.0, 1.0, 5.0, 1.0, 1.0, 0.0])
    result = token_logprobs(logits, 4, 4)
    assert result.token_ids == [4, 3, 1, 2, 4]
    assert result.rank == 2
    assert token_logprobs(torch.zeros(500), 499, 3).token_ids == [499, 0, 1, 2]


def test_more_than_the_vocabulary_is_all_of_it() -> None:
    assert token_logprobs(torch.tensor([0.0, 1.0]), 0, 20).token_ids == [0, 1, 0]


def test_a_token_without_any_probability_has_minus_infinity() -> None:
    result = token_logprobs(torch.tensor([0.0, -math.inf]), 1, 0)
    assert (result.token_ids, result.logprobs, result.rank) == ([1], [-math.inf], 2)


def test_raw_logits_are_rated_whatever_was_edited() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    params = SamplingParams(temperature=0.0, logprobs=1, logit_bias={0: -100.0, 1: -100.0})
    rated = sample(logits, [params]).logprobs[0]
    assert rated.token_ids == [2, 0]
    assert rated.logprobs == pytest.approx(logits[0].log_softmax(-1)[[2, 0]].tolist(), rel=1e-6)
    assert rated.rank == 3


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    logits = random_logits(37, 1003)
    params = [SamplingParams(logprobs=5, seed=row) for row in range(37)]
    together = sample(logits, params)
    for row in range(37):
        assert sample(logits[row : row + 1], params[row : row + 1]).logprobs[0] == together.logprobs[row]


def test_prompt_tokens_are_rated_one_by_one() -> None:
    logits = random_logits(4, 50)
    rated = prompt_logprobs(logits, torch.tensor([3, 1, 4, 1]), 2)
    assert rated == [token_logprobs(row, token_id, 2) for row, token_id in zip(logits, [3, 1, 4, 1], strict=True)]


def test_a_prompt_with_nan_logits_says_so() -> None:
    logits = random_logits(3, 50)
    logits[1, 7] = math.nan
    with pytest.raises(RequestError, match="1 positions"):
        prompt_logprobs(logits, torch.tensor([0, 1, 2]), 0)


def test_the_most_likely_are_found_among_candidates_or_all() -> None:
    logits = random_logits(1, 300)[0].round() * 0.5  # ties, zeros of both signs among them
    for count in (1, 7, 300):
        assert torch.equal(_likeliest(logits, count), _keys(logits, torch.arange(300)).topk(count).values)
