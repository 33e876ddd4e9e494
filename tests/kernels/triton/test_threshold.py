"""What top-k and top-p keep, found by counting: what sorting finds, to the token, however a row is divided."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.breadth import pick
from tests.kernels.triton.device import DEVICE

from octavo.kernels.triton import draw as module
from octavo.kernels.triton.draw import thresholds
from octavo.sampling import filters

LOGITS = st.one_of(
    st.sampled_from([-torch.inf, -30.0, -1.5, -0.0, 0.0, 1e-45, 0.25, 1.0, 3.0]), st.floats(-50, 50, width=32)
)


def kept(logits: torch.Tensor, top_k: int, top_p: float, temperature: float) -> torch.Tensor:
    num_rows = len(logits)
    columns = [
        torch.full((num_rows,), value, dtype=dtype, device=DEVICE)
        for value, dtype in ((temperature, torch.float64), (top_k, torch.int64), (top_p, torch.float64))
    ]
    return logits >= thresholds(logits, logits.amax(-1), *columns)[:, None]


def sorted_out(logits: torch.Tensor, top_k: int, top_p: float, temperature: float) -> torch.Tensor:
    num_rows = len(logits)
    temperatures = torch.full((num_rows,), temperature, dtype=torch.float64, device=DEVICE)
    least = filters.thresholds(
        logits,
        temperatures,
        top_k=torch.full((num_rows,), min(top_k, logits.shape[1]), device=DEVICE),
        top_p=torch.full_like(temperatures, top_p),
        min_p=torch.zeros_like(temperatures),
    )
    return logits >= least[:, None]


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes a millisecond for each."""
    monkeypatch.setattr(module, "_BLOCK", 1024)


@settings(max_examples=pick(12, 100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    row=st.lists(LOGITS, min_size=1, max_size=30).filter(lambda row: max(row) > -torch.inf),
    top_k=st.integers(1, 33),
    top_p=st.sampled_from([0.05, 0.37, 0.8, 0.97, 1.0]),
    temperature=st.sampled_from([1e-30, 0.01, 0.7, 1.0, 3.0]),
)
def test_what_is_kept_is_what_sorting_keeps(row: list[float], top_k: int, top_p: float, temperature: float) -> None:
    logits = torch.tensor([row], device=DEVICE)
    assert torch.equal(kept(logits, top_k, top_p, temperature), sorted_out(logits, top_k, top_p, temperature))


@pytest.mark.parametrize("spread", pick([5.0], [0.0, 1e-6, 1.0, 5.0]))
def test_many_tokens_in_many_parts(spread: float) -> None:
    logits = (torch.randn(2, 1300, generator=torch.Generator().manual_seed(3)) * spread).to(DEVICE)
    for top_k, top_p in ((1300, 0.9), (1299, 1.0), (400, 0.3), (1, 0.5)):
        assert torch.equal(kept(logits, top_k, top_p, 1.0), sorted_out(logits, top_k, top_p, 1.0))


def test_a_row_divided_otherwise_keeps_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(3, 1300, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    whole = kept(logits, 400, 0.9, 1.0)
    monkeypatch.setattr(module, "_BLOCK", 256)
    monkeypatch.setattr(module, "_part_size", lambda num_rows, vocab_size: 512)
    assert torch.equal(kept(logits[1:2], 400, 0.9, 1.0), whole[1:2])


@pytest.mark.parametrize(("num_rows", "part"), [(1, 1024), (32, 8192), (256, 16384)])
def test_few_rows_are_divided_among_many_programs(num_rows: int, part: int) -> None:
    assert module._part_size(num_rows, 151_936) == part
