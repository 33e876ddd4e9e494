"""Penalties, bias, allowed ids, bad words and min_tokens: each by its definition, and all against the reference."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.triton.device import DEVICE
from tests.sampling import reference
from tests.sampling.support import Rows, masks_of
from triton import language as tl

from octavo.kernels.triton import logits as module
from octavo.sampling_params import SamplingParams

VOCAB = 12
IDS = st.integers(0, VOCAB - 1)


def process_logits(
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    logits: Sequence[float] = (0.0,) * VOCAB,
    eos_token_ids: Sequence[int] = (),
    bad_words_token_ids: Sequence[Sequence[int]] = (),
) -> list[float]:
    """Edit `logits` for a row with these tokens."""
    rows = Rows(1, len(logits))
    seeded, bad_words = params.replace(seed=0), bad_words_token_ids
    rows.add(0, seeded, prompt=prompt, output=output, eos_token_ids=eos_token_ids, bad_words=bad_words)
    step = rows.gather([0])
    if not step.arrays[1]:
        return list(logits)
    processed: list[float] = rows.process(torch.tensor([logits]), step)[0].tolist()
    return processed


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    processed = process_logits(
        SamplingParams(repetition_penalty=2.0), prompt=[0, 1], output=[1, 3], logits=[4.0, -4.0, 4.0, 0.0]
    )
    assert processed == [2.0, -8.0, 4.0, 0.0]


def test_presence_counts_once_and_frequency_each_time_in_the_output_only() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    assert process_logits(params, prompt=[0, 0], output=[1, 2, 2], logits=[0.0] * 4) == [0.0, -0.75, -1.0, 0.0]


def test_bias_is_added() -> None:
    assert process_logits(SamplingParams(logit_bias={1: 2.5, 3: -100.0}), logits=[1.0] * 4) == [1.0, 3.5, 1.0, -99.0]


def test_only_allowed_ids_remain() -> None:
    params = SamplingParams(allowed_token_ids=[2, 0, 2])
    assert process_logits(params, logits=[1.0, 2.0, 3.0]) == [1.0, -math.inf, 3.0]


@pytest.mark.parametrize(
    ("known", "banned"), [([], []), ([1], [2]), ([1, 2], [3]), ([9, 1, 2], [3]), ([2, 1, 3], []), ([3, 1], [2, 4])]
)
def test_a_bad_word_is_banned_at_its_last_token(known: list[int], banned: list[int]) -> None:
    words = [[1, 2], [1, 2, 3], [3, 1, 4]]
    processed = process_logits(SamplingParams(), prompt=known, bad_words_token_ids=words)
    assert [token_id for token_id in range(VOCAB) if processed[token_id] == -math.inf] == sorted(banned)


@pytest.mark.parametrize(("num_output", "is_banned"), [(0, True), (2, True), (3, False), (4, False)])
def test_min_tokens_bans_the_ends_until_reached(num_output: int, is_banned: bool) -> None:
    params = SamplingParams(min_tokens=3, stop_token_ids=[5])
    processed = process_logits(params, output=[1] * num_output, eos_token_ids=[4])
    assert [processed[token_id] == -math.inf for token_id in (4, 5, 6)] == [is_banned, is_banned, False]


@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=VOCAB, max_size=VOCAB),
    prompt=st.lists(IDS, min_size=1, max_size=8),
    output=st.lists(IDS, max_size=8),
    params=st.builds(
        SamplingParams,
        repetition_penalty=st.sampled_from([0.5, 1.0, 1.3]),
        presence_penalty=st.sampled_from([-2.0, 0.0, 0.7]),
        frequency_penalty=st.sampled_from([-0.3, 0.0, 1.1]),
        logit_bias=st.none() | st.dictionaries(IDS, st.sampled_from([-100.0, 3.5])),
        allowed_token_ids=st.none() | st.lists(IDS, min_size=1),
        stop_token_ids=st.lists(IDS, max_size=2),
        min_tokens=st.integers(0, 8),
    ),
    bad_words=st.lists(st.lists(IDS, min_size=1, max_size=3), max_size=3),
)
def test_all_edits_together_are_the_reference(
    logits: list[float],
    prompt: list[int],
    output: list[int],
    params: SamplingParams,
    bad_words: list[list[int]],
) -> None:
    processed = process_logits(
        params,
        prompt=prompt,
        output=output,
        logits=logits,
        eos_token_ids=[3],
        bad_words_token_ids=bad_words,
    )
    expected = reference.process_logits(
        logits, params, prompt=prompt, output=output, eos_token_ids=[3], bad_words_token_ids=bad_words
    )
    assert processed == pytest.approx(expected, rel=1e-6, abs=1e-5)


MANY, STOP_IDS = 77, [3, 70]
# What a row asks for, its bad words, its prompt and its output.
Row = tuple[dict[str, Any], list[list[int]], list[int], list[int]]
ROWS: list[Row] = [
    ({}, [], [1, 2, 3], [4]),
    ({"repetition_penalty": 1.3}, [], [5, 5, 6, 76], [5, 9]),
    ({"presence_penalty": 0.7, "frequency_penalty": -0.3}, [], [5, 6], [9, 9, 9, 6]),
    ({"repetition_penalty": 0.7, "frequency_penalty": 1.1, "logit_bias": {9: 2.5, 8: -100.0}}, [], [9], [9, 8, 8]),
    ({"allowed_token_ids": [0, 31, 32, 63, 64, 76]}, [[31], [2, 32], [4, 63]], [2], [9, 4]),
    ({"min_tokens": 3, "logit_bias": {3: 5.0}}, [], [2], [7, 7]),
    ({"min_tokens": 2}, [[7, 7, 7, 70]], [2], [7, 7]),
    ({"presence_penalty": 2.0}, [[7, 7, 1], [7, 8, 2], [8, 3]], [7], [7, 8]),
    ({"repetition_penalty": 2.0}, [], [1], []),
]
MASKED = (0, 3, 6)  # rows under a grammar


@pytest.fixture(params=["torch", "triton"])
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_GPU_KERNELS", request.param)
    monkeypatch.setattr(module, "_TOKENS", tl.constexpr(16))  # contexts and rows of several programs
    monkeypatch.setattr(module, "_IDS", tl.constexpr(64))


def processed_rows(logits: torch.Tensor, row_ids: list[int], *, is_masked: bool) -> torch.Tensor:
    """Edit as a step of these rows does."""
    rows = Rows(len(ROWS), MANY, DEVICE)
    for row, (options, bad_words, prompt, output) in enumerate(ROWS):
        params = SamplingParams.from_options({"seed": row, **options})
        rows.add(row, params, prompt=prompt, output=output, eos_token_ids=STOP_IDS, bad_words=bad_words)
    words = np.random.default_rng(4).integers(-(2**31), 2**31, (len(ROWS), 3), dtype=np.int32)
    masks = {at: words[row] for at, row in enumerate(row_ids) if is_masked and row in MASKED}
    step = rows.gather(row_ids, masks=masks_of(masks))
    return rows.process(logits[row_ids], step) if step.arrays[1] else logits[row_ids]


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("row_ids", [list(range(len(ROWS))), [8, 3, 1], [0], [7, 6]])
@pytest.mark.parametrize("is_masked", [False, True])
def test_a_row_among_others_has_the_bits_of_the_row_alone_by_the_definition(
    row_ids: list[int], is_masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = (torch.randn(len(ROWS), MANY, generator=torch.Generator().manual_seed(1)) * 4).to(DEVICE)
    before = logits.clone()
    result = processed_rows(logits, row_ids, is_masked=is_masked)
    assert torch.equal(logits, before)
    monkeypatch.setenv("OCTAVO_GPU_KERNELS", "torch")
    alone = torch.cat([processed_rows(logits, [row], is_masked=is_masked) for row in row_ids])
    torch.testing.assert_close(result, alone, rtol=0, atol=0)


@pytest.mark.usefixtures("_kernels")
def test_every_kind_of_edit_shows() -> None:
    """Else rows that are edited by nobody would be equal, too."""
    logits = torch.ones(len(ROWS), MANY, device=DEVICE)
    changed = (processed_rows(logits, list(range(len(ROWS))), is_masked=False) != logits).sum(-1).tolist()
    assert changed == [0, 4, 2, 2, 73, 2, 0, 4, 1]
