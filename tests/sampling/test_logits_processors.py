"""Penalties, bias, allowed ids, bad words and min_tokens: each by its definition, and all against the reference."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.sampling import reference

from octavo.sampling.logits_processors import BadWords, RowLogitsProcessors
from octavo.sampling.penalties import TokenCounts
from octavo.sampling_params import SamplingParams

VOCAB = 12
IDS = st.integers(0, VOCAB - 1)


def process_logits(
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    resumed_at: int = 0,
    logits: Sequence[float] = (0.0,) * VOCAB,
    eos_token_ids: Sequence[int] = (),
    bad_words_token_ids: Sequence[Sequence[int]] = (),
) -> list[float]:
    """Edit `logits` for a row that was added with `resumed_at` output tokens and saw the others one by one."""
    processors = RowLogitsProcessors(
        params,
        stop_token_ids=[*eos_token_ids, *params.stop_token_ids],
        bad_words_token_ids=bad_words_token_ids,
        token_ids=np.array([*prompt, *output[:resumed_at]], dtype=np.int32),
        num_prompt_tokens=len(prompt),
        device=torch.device("cpu"),
    )
    for token_id in output[resumed_at:]:
        processors.append(token_id)
    row = torch.tensor(logits)
    processors.apply(row, len(output))
    return row.tolist()


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
    assert sorted(BadWords(words, np.array(known, dtype=np.int32)).banned()) == sorted(banned)
    grown = BadWords(words, np.array([], dtype=np.int32))
    for token_id in known:
        grown.append(token_id)
    assert sorted(grown.banned()) == sorted(banned)


@pytest.mark.parametrize(("num_output", "is_banned"), [(0, True), (2, True), (3, False), (4, False)])
def test_min_tokens_bans_the_ends_until_reached(num_output: int, is_banned: bool) -> None:
    params = SamplingParams(min_tokens=3, stop_token_ids=[5])
    processed = process_logits(params, output=[1] * num_output, eos_token_ids=[4])
    assert [processed[token_id] == -math.inf for token_id in (4, 5, 6)] == [is_banned, is_banned, False]


@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=VOCAB, max_size=VOCAB),
    prompt=st.lists(IDS, max_size=8),
    output=st.lists(IDS, max_size=8),
    resumed_at=st.integers(0, 8),
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
def test_all_edits_together_are_the_reference_however_the_row_came_to_its_tokens(
    logits: list[float],
    prompt: list[int],
    output: list[int],
    resumed_at: int,
    params: SamplingParams,
    bad_words: list[list[int]],
) -> None:
    processed = process_logits(
        params,
        prompt=prompt,
        output=output,
        resumed_at=resumed_at,
        logits=logits,
        eos_token_ids=[3],
        bad_words_token_ids=bad_words,
    )
    expected = reference.process_logits(
        logits, params, prompt=prompt, output=output, eos_token_ids=[3], bad_words_token_ids=bad_words
    )
    assert processed == pytest.approx(expected, rel=1e-6, abs=1e-5)


def test_counts_grow_past_their_first_columns() -> None:
    counts = TokenCounts()
    counts.add_all(np.arange(100, dtype=np.int32))
    for token_id in range(50, 1000):
        counts.add(token_id)
    token_ids, numbers = counts.columns(torch.device("cpu"))
    assert token_ids.tolist() == list(range(1000))
    assert numbers.tolist() == [1] * 50 + [2] * 50 + [1] * 900
