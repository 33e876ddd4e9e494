"""Bans of a grammar: exactly the tokens whose bit is not set, only in the rows that are under one."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling.support import Rows, masks_of, sample_rows

from octavo.contracts.schedule import Int32Array
from octavo.sampling.sampler import SampledTokens
from octavo.sampling_params import SamplingParams

VOCAB = 77  # no multiple of 32


def words_of(allowed: set[int], num_words: int = 3) -> Int32Array:
    """Return one mask [W], bit by bit."""
    words = np.zeros(num_words, dtype=np.uint32)
    for token_id in allowed:
        words[token_id // 32] |= np.uint32(1 << (token_id % 32))
    return words.view(np.int32)


def sample(
    logits: torch.Tensor, params: list[SamplingParams], masks: dict[int, set[int]], output_index: int = 0
) -> SampledTokens:
    """Sample `logits` [L, V]; row j is the worker's row 2 j, and `masks` are by j."""
    rows = Rows(2 * len(params), logits.shape[1])
    for at, row_params in enumerate(params):
        rows.add(2 * at, row_params.replace(seed=at), eos_token_ids=[3])
    words = {at: words_of(masks[at]) for at in list(masks)[::-1]}  # need not come in the order of the rows
    return sample_rows(rows, logits, rows.gather(range(0, 2 * len(params), 2), output_index, masks_of(words)))


WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"top_k": 3},
    {"top_p": 0.5, "temperature": 2.0},
    {"min_p": 0.2},
    {"repetition_penalty": 1.5, "logit_bias": {1: 100.0}},
    {"allowed_token_ids": [5, 40, 76]},
]


@settings(max_examples=60, deadline=None)
@given(allowed=st.sets(st.integers(0, VOCAB - 1), min_size=1), way=st.sampled_from(WAYS), seed=st.integers(0, 2**16))
def test_only_what_is_allowed_is_drawn(allowed: set[int], way: dict[str, Any], seed: int) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    result = sample(logits, [SamplingParams(**way)], {0: allowed})
    possible = allowed & set(way.get("allowed_token_ids", allowed))
    assert bool(result.errors) == (not possible)
    if possible:
        assert int(result.token_ids[0]) in possible


def test_a_mask_is_read_bit_by_bit() -> None:
    allowed = {0, 31, 32, 63, 64, 76}
    rows = Rows(1, VOCAB)
    rows.add(0, SamplingParams(seed=0))
    logits = rows.process(torch.zeros(1, VOCAB), rows.gather([0], 0, masks_of({0: words_of(allowed)})))
    assert {int(at) for at in logits[0].isfinite().nonzero()[:, 0]} == allowed


def test_bits_beyond_the_vocabulary_mean_nothing() -> None:
    result = sample(torch.zeros(1, VOCAB), [SamplingParams(temperature=0.0)], {0: {90, 95, 12}})
    assert result.token_ids.tolist() == [12]


def test_a_mask_changes_its_own_row_only() -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(**way) for way in WAYS[:6]]
    masks = {1: {5, 6}, 4: {70}}
    together = sample(logits, params, masks)
    free = sample(logits, params, {})
    for at in range(6):
        if at in masks:
            assert int(together.token_ids[at]) in masks[at]
        else:
            assert together.token_ids[at] == free.token_ids[at]


def test_what_a_mask_leaves_is_drawn_as_if_it_were_all() -> None:
    """A mask over everything but some ids, and `allowed_token_ids` of these: the same token, by the same noise."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    for way in WAYS[:5]:
        masked = sample(logits, [SamplingParams(**way)], {0: {4, 8, 15, 16, 23, 42}})
        listed = sample(logits, [SamplingParams(allowed_token_ids=[4, 8, 15, 16, 23, 42], **way)], {})
        assert masked.token_ids.tolist() == listed.token_ids.tolist()


def test_min_tokens_and_a_grammar_that_wants_the_end() -> None:
    params = [SamplingParams(min_tokens=2, max_tokens=5)]
    assert 3 not in sample(torch.zeros(1, VOCAB), params, {0: {3, 7}}).token_ids
    assert "structured_output" in sample(torch.zeros(1, VOCAB), params, {0: {3}}).errors[0]
    assert sample(torch.zeros(1, VOCAB), params, {0: {3}}, output_index=2).token_ids.tolist() == [3]


def test_the_logits_are_not_changed_and_logprobs_are_the_model_s() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    result = sample(logits, [SamplingParams(logprobs=0)], {0: {7}})
    assert torch.equal(logits, before)
    assert result.logprobs[0].logprobs[0] == pytest.approx(float(logits.log_softmax(-1)[0, 7]), abs=1e-5)
