"""Tokens drawn without asking the device: those of the sampler, row by row, by torch's ops and by Triton's kernels."""

from collections.abc import Iterable

import pytest
import torch
from tests.breadth import each, pick
from tests.kernels.triton.device import DEVICE
from tests.sampling.support import Rows

from octavo.kernels.triton import draw as kernel
from octavo.sampling import draw as module
from octavo.sampling.draw import SamplingMetadata, draw, draw_by_torch
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
KINDS = ["spiky", "masked", "tied", "huge", "spread", "flat", "tiny"]


@pytest.fixture(params=["torch", "triton"])
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_GPU_KERNELS", request.param)


def metadata_of(are_needed: list[dict[str, float]], vocab_size: int, index: int) -> SamplingMetadata:
    rows = Rows(len(are_needed), vocab_size, DEVICE)
    for row, options in enumerate(are_needed):
        rows.add(row, SamplingParams.from_options({"temperature": 1.0, "seed": 2**63 + 977 * row, **options}))
    return rows.metadata(rows.gather(range(len(are_needed)), index))


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
@each(
    ("kind", "alone"),
    [(kind, pick([2 * at], range(len(FILTERS)))) for at, kind in enumerate(KINDS[: pick(2, None)])],
)
def test_tokens_are_the_samplers(
    kind: str, alone: Iterable[int], vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default a row is drawn alone from logits of one kind, and with others from all kinds."""
    monkeypatch.setattr(module, "rows_at_once", lambda logits: 4)
    monkeypatch.setattr(kernel, "_DRAWN_PART", 1024)
    logits, metadata = logits_of(kind, len(FILTERS), vocab_size), metadata_of(FILTERS, vocab_size, 5)
    max_logit, tokens = draw(logits, metadata, is_filtered=True)
    defined = draw_by_torch(logits, metadata, is_filtered=True)
    defined = torch.where(metadata.temperature > 0, defined, logits.argmax(-1))
    assert tokens.tolist() == defined.tolist()
    for row in alone:  # and without filters where it has none
        one, asks = slice(row, row + 1), any(name in FILTERS[row] for name in ("top_k", "top_p", "min_p"))
        assert int(draw(logits[one], metadata.rows(one), is_filtered=asks)[1]) == int(tokens[row])
    assert torch.equal(max_logit, logits.amax(-1))


@pytest.mark.usefixtures("_kernels")
def test_what_is_not_finite_harms_no_other_row() -> None:
    logits, metadata = logits_of("spread", len(FILTERS), 301), metadata_of(FILTERS, 301, 0)
    _, expected = draw(logits, metadata, is_filtered=True)
    logits[2, 7], logits[3, 9], logits[7] = torch.nan, torch.inf, -torch.inf
    max_logit, tokens = draw(logits, metadata, is_filtered=True)
    good = [0, 1, 4, 5, 6, 8]
    assert tokens[good].tolist() == expected[good].tolist()
    assert ((tokens >= 0) & (tokens < 301)).all()
    assert max_logit.isfinite().tolist() == [row in good for row in range(len(FILTERS))]
