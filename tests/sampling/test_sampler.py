"""The sampler as a whole: a row alone is that row in any batch, bit for bit, and a bad row fails alone."""

import math
from dataclasses import dataclass
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.breadth import pick
from tests.sampling import reference
from tests.sampling.support import Rows, sample, sample_one, sample_rows

from octavo.contracts.engine import TokenLogprobs
from octavo.sampling.rows import ARGMAX
from octavo.sampling_params import SamplingParams

VOCAB = 300  # wider than the filters' first view
IDS = st.integers(0, VOCAB - 1)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 7, 290]),
    top_p=st.sampled_from([0.3, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    presence_penalty=st.sampled_from([0.0, 0.6]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    logit_bias=st.none() | st.dictionaries(IDS, st.sampled_from([-5.0, 4.0]), max_size=3),
    allowed_token_ids=st.none() | st.lists(IDS, min_size=2, max_size=40),
    min_tokens=st.sampled_from([0, 3]),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.sampled_from([None, 0, 4]),
)


@dataclass(frozen=True)
class Request:
    """One row: its parameters and what it knows."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]
    logits_seed: int

    def logits(self) -> torch.Tensor:
        return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(self.logits_seed)) * 3


REQUESTS = st.builds(
    Request,
    params=PARAMS,
    prompt=st.lists(IDS, min_size=1, max_size=6),
    output=st.lists(IDS, max_size=6),
    logits_seed=st.integers(0, 1000),
)


def run(requests: list[Request], rows_of: list[int]) -> list[tuple[int, TokenLogprobs | None]]:
    """Sample all requests in one call, request j in the worker's row `rows_of[j]`."""
    rows = Rows(64, VOCAB)
    for row, request in zip(rows_of, requests, strict=True):
        texts = {"prompt": request.prompt, "output": request.output}
        rows.add(row, request.params, eos_token_ids=[5], bad_words=[[6, 7]], **texts)
    logits = torch.cat([request.logits() for request in requests])
    result = sample_rows(rows, logits, rows.gather(rows_of))
    assert not result.errors
    return [(token_id, result.logprobs.get(at)) for at, token_id in enumerate(result.token_ids.tolist())]


@settings(max_examples=pick(30, 60))
@given(st.lists(REQUESTS, min_size=2, max_size=9), st.randoms(use_true_random=False))
def test_a_row_alone_is_that_row_in_any_batch(requests: list[Request], random: Random) -> None:
    rows_of = random.sample(range(64), len(requests))
    together = run(requests, rows_of)
    for request, answer in zip(requests, together, strict=True):
        assert run([request], [0]) == [answer]


@given(REQUESTS)
def test_a_row_is_what_the_reference_says(request: Request) -> None:
    processed = reference.process_logits(
        request.logits()[0].tolist(),
        request.params,
        prompt=request.prompt,
        output=request.output,
        eos_token_ids=[5],
        bad_words_token_ids=[[6, 7]],
    )
    assert run([request], [3])[0][0] == reference.draw(processed, request.params, len(request.output))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_large_vocabulary_gives_the_same_alone_batched_and_on_any_number_of_threads(num_threads: int) -> None:
    """V as in Qwen3, in one-row slices, with batches whose rows start at odd addresses."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 151_935, generator=generator) * 2
    params = [
        SamplingParams(seed=1, logprobs=3),
        SamplingParams(seed=2, top_p=0.9, logprobs=3),
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(seed=3, top_k=40, temperature=0.8),
        SamplingParams(seed=4, temperature=1.7, logit_bias={9: 5.0}),
    ]
    before = torch.get_num_threads()
    expected = sample(logits, params)
    torch.set_num_threads(num_threads)
    try:
        alone = [sample(logits[at : at + 1], params[at : at + 1]) for at in range(5)]
    finally:
        torch.set_num_threads(before)
    assert [int(one.token_ids[0]) for one in alone] == expected.token_ids.tolist()
    assert {at: one.logprobs[0] for at, one in enumerate(alone) if one.logprobs} == expected.logprobs


def test_greedy_ties_go_to_the_lowest_id() -> None:
    for size in (3, 40, 5000, 151_936):
        logits = [0.0] * size
        assert sample_one(logits, SamplingParams(temperature=0.0)) == 0
        logits[1] = logits[size - 1] = 2.0
        assert sample_one(logits, SamplingParams(temperature=0.0)) == 1


def test_the_noise_depends_on_seed_and_output_index() -> None:
    flat = [0.0] * 1000
    by_seed = {sample_one(flat, SamplingParams(seed=seed)) for seed in (0, 1, 2**32, 2**63)}
    by_index = {sample_one(flat, SamplingParams(seed=0), index) for index in range(4)}
    assert (len(by_seed), len(by_index)) == (4, 4)


def test_a_row_with_nan_or_infinity_fails_alone() -> None:
    logits = torch.zeros(4, 10)
    logits[1, 3], logits[2, 4] = math.nan, math.inf
    logits[3, 5] = 9.0
    mixed = [SamplingParams(temperature=0.0), SamplingParams(top_k=3, logprobs=1), SamplingParams(logprobs=1)]
    result = sample(logits, [*mixed, SamplingParams(temperature=0.0, logprobs=1)])
    assert sorted(result.errors) == [1, 2]
    assert "NaN" in result.errors[1]
    assert "infinity" in result.errors[2]
    assert [int(result.token_ids[at]) for at in (0, 3)] == [0, 5]
    assert list(result.logprobs) == [3]


GREEDY = SamplingParams(temperature=0.0, seed=0)


@pytest.mark.parametrize(
    ("params", "needs_argmax_only"),
    [
        ([GREEDY, GREEDY.replace(top_k=5)], True),
        ([GREEDY, GREEDY.replace(temperature=1.0)], False),
        ([GREEDY, GREEDY.replace(logprobs=0)], False),
        ([GREEDY.replace(presence_penalty=0.5), GREEDY], False),
        ([GREEDY, GREEDY.replace(min_tokens=2)], False),
    ],
)
def test_the_largest_is_enough_where_all_rows_are_plain_and_greedy(
    params: list[SamplingParams], needs_argmax_only: bool
) -> None:
    rows = Rows(len(params), 10)
    for row, row_params in enumerate(params):
        rows.add(row, row_params, eos_token_ids=[5])
    assert (rows.gather(range(len(params))).ending == ARGMAX) is needs_argmax_only


def test_the_largest_alone_tells_what_all_logits_tell() -> None:
    logits = torch.randn(6, 10, generator=torch.Generator().manual_seed(1))
    logits[1, 3], logits[2, 4], logits[3], logits[4, 2] = math.nan, math.inf, -math.inf, -math.inf
    alone = sample(logits, [GREEDY] * 6)
    whole = sample(logits, [GREEDY.replace(logprobs=0)] * 6)
    assert alone.errors == whole.errors
    assert sorted(whole.errors) == [1, 2, 3]
    good = [0, 4, 5]
    assert alone.token_ids[good].tolist() == whole.token_ids[good].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_a_row_that_bans_every_token_fails_alone(temperature: float, top_p: float) -> None:
    impossible = SamplingParams(temperature=temperature, top_p=top_p, allowed_token_ids=[2], min_tokens=1, logprobs=1)
    rows = Rows(2, 8)
    for row, params in enumerate((impossible, impossible.replace(min_tokens=0))):
        rows.add(row, params.replace(seed=row), eos_token_ids=[2])
    result = sample_rows(rows, torch.zeros(2, 8), rows.gather([0, 1]))
    assert list(result.errors) == [0]
    assert "min_tokens" in result.errors[0]
    assert int(result.token_ids[1]) == 2
    assert list(result.logprobs) == [1]


def test_the_callers_logits_are_not_changed() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    params = SamplingParams(logit_bias={1: 5.0}, allowed_token_ids=[1, 2, 3], top_k=2)
    sample(logits[:1], [params])
    sample(logits, [params, params.replace(temperature=0.0), SamplingParams()])
    assert torch.equal(logits, before)


def test_a_reused_row_forgets_its_former_request() -> None:
    rows, logits = Rows(1, 4), torch.tensor([[3.0, 1.0, 0.0, 0.0]])
    rows.add(0, SamplingParams(temperature=0.0, seed=0, frequency_penalty=2.0), prompt=[1], output=[0, 0, 0])
    assert int(sample_rows(rows, logits, rows.gather([0])).token_ids[0]) == 1
    rows.add(0, SamplingParams(temperature=0.0, seed=0, logprobs=0), prompt=[1], output=[0, 0, 0])
    assert int(sample_rows(rows, logits, rows.gather([0])).token_ids[0]) == 0


def test_sampled_tokens_count_from_the_next_draw_on() -> None:
    rows = Rows(2, 4)
    for row, penalty in enumerate((2.0, 0.0)):
        rows.add(row, SamplingParams(temperature=0.0, seed=0, presence_penalty=penalty), prompt=[3])
    logits, drawn = torch.tensor([[2.0, 1.0, 0.5, 0.0]] * 2), []
    for _ in range(3):
        token_ids = sample_rows(rows, logits, rows.gather([0, 1])).token_ids.tolist()
        for row, token_id in enumerate(token_ids):
            rows.append(row, token_id)
        drawn.append(token_ids)
    assert drawn == [[0, 0], [1, 0], [2, 0]]


def test_ids_that_the_model_lacks_are_no_obstacle() -> None:
    """A tokenizer may know more ids than its model has logits: such a stop id or bad word can never be sampled."""
    rows = Rows(1, 4)
    params = SamplingParams(temperature=0.0, seed=0, min_tokens=2, stop_token_ids=[1])
    rows.add(0, params, eos_token_ids=[9], bad_words=[[9], [0, 8], [2]])
    result = sample_rows(rows, torch.tensor([[0.0, 3.0, 2.0, 1.0]]), rows.gather([0]))
    assert (result.token_ids.tolist(), result.errors) == ([3], {})
