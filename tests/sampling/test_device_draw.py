"""Tokens drawn without asking the device: those of the sampler, row by row, by torch's ops and by Triton's kernels."""

import numpy as np
import pytest
import torch
from tests.breadth import each, pick
from tests.kernels.triton.device import DEVICE

from octavo.kernels.triton import draw
from octavo.sampling import device_draw
from octavo.sampling.device_draw import FLOAT_COLUMNS, SamplingMetadata, draw_on_device
from octavo.sampling.rows import SamplingRows
from octavo.sampling.sampler import Sampler
from octavo.sampling_params import SamplingParams

FILTERS: list[dict[str, float]] = [
    {},
    {"top_k": 1},
    {"top_k": 20, "top_p": 0.95},
    {"top_p": 0.9},
    {"top_p": 0.2, "temperature": 3.0},
    {"min_p": 0.05},
    {"temperature": 0.0, "top_k": 5},
    {"top_k": 200, "top_p": 0.7, "min_p": 0.001, "temperature": 0.3},
    {"top_k": 100_000, "top_p": 0.9999},
]


@pytest.fixture(params=["torch", "triton"])
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_GPU_KERNELS", request.param)


def rows_of(are_needed: list[dict[str, float]], vocab_size: int) -> SamplingRows:
    rows = SamplingRows(len(are_needed), vocab_size, DEVICE)
    for row, options in enumerate(are_needed):
        params = SamplingParams.from_options({"temperature": 1.0, "seed": 2**63 + 977 * row, **options})
        rows.add(row, params, [], [], np.zeros(1, dtype=np.int32), 1)
    return rows


def metadata_of(rows: SamplingRows, num_rows: int, index: int) -> SamplingMetadata:
    records = rows.records(np.arange(num_rows, dtype=np.int32))
    names = {"temperatures": "temperature", "num_logprobs": "num_logprobs"} | {
        name: name for name in ("seed_low", "seed_high", "top_k", *FLOAT_COLUMNS[1:])
    }
    columns = {name: torch.from_numpy(records[field].copy()).to(DEVICE) for name, field in names.items()}
    unasked = dict.fromkeys(("num_prompt_tokens", "mask_indices"), columns["top_k"])
    return SamplingMetadata(**columns, output_indices=torch.full((num_rows,), index, device=DEVICE), **unasked)


def logits_of(kind: str, num_rows: int, vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    noise = torch.randn(num_rows, vocab_size, generator=generator)
    made = {
        "spread": noise * 3,
        "flat": noise * 1e-3,
        "spiky": noise + 12.0 * (noise > 2.5),
        "tied": (noise * 2).round() * 0.5,  # zeros of both signs among them
        "masked": (noise * 2).masked_fill(noise.abs() > 0.2, -torch.inf).index_fill(1, torch.tensor([0]), 1.0),
        "tiny": noise * 1e-38,
        "huge": noise * 1e37,
    }
    return made[kind].to(DEVICE)


@pytest.mark.usefixtures("_kernels")
@each("vocab_size", pick([301], [1, 301, 1100]))
@each("kind", pick(["spiky", "tied", "masked", "huge"], ["spread", "flat", "spiky", "tied", "masked", "tiny", "huge"]))
def test_tokens_are_the_samplers(kind: str, vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_draw, "_SLICE", 4 * vocab_size)
    monkeypatch.setattr(draw, "_PART", 1024)
    rows, logits = rows_of(FILTERS, vocab_size), logits_of(kind, len(FILTERS), vocab_size)
    ids = np.arange(len(FILTERS), dtype=np.int32)
    max_logit, tokens = draw_on_device(logits, metadata_of(rows, len(FILTERS), 5), is_filtered=True)
    are_needed = Sampler(rows).sample(logits, ids, np.full(len(FILTERS), 5, dtype=np.int32))
    assert tokens.tolist() == are_needed.token_ids.tolist()
    assert torch.equal(max_logit, logits.amax(-1))


@pytest.mark.usefixtures("_kernels")
def test_what_is_not_finite_harms_no_other_row() -> None:
    rows, logits = rows_of(FILTERS, 301), logits_of("spread", len(FILTERS), 301)
    metadata = metadata_of(rows, len(FILTERS), 0)
    _, expected = draw_on_device(logits, metadata, is_filtered=True)
    logits[2, 7], logits[3, 9], logits[7] = torch.nan, torch.inf, -torch.inf
    max_logit, tokens = draw_on_device(logits, metadata, is_filtered=True)
    good = [0, 1, 4, 5, 6, 8]
    assert tokens[good].tolist() == expected[good].tolist()
    assert ((tokens >= 0) & (tokens < 301)).all()
    assert max_logit.isfinite().tolist() == [row in good for row in range(len(FILTERS))]
