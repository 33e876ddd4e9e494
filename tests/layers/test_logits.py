"""Logits: float32, in slices without a seam, and from the embedding's own table when tied."""

import pytest
import torch
from tests.models.paged import make_context

from octavo.layers.embedding import Embedding
from octavo.layers.logits import LogitsHead

HIDDEN_SIZE, VOCAB_SIZE = 24, 50


def make_head(dtype: torch.dtype, *, is_tied: bool) -> tuple[LogitsHead, torch.Tensor]:
    """Return a head and its weight [V, D]."""
    context = make_context(dtype)
    weight = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)
    embedding = Embedding(VOCAB_SIZE, HIDDEN_SIZE, context=context)
    embedding.load_weight("weight", weight)
    head = LogitsHead(HIDDEN_SIZE, VOCAB_SIZE, tied_to=embedding if is_tied else None, context=context)
    assert set(head.weight_shapes()) == (set() if is_tied else {"weight"})
    if not is_tied:
        head.load_weight("weight", weight)
    head.process_weights_after_loading()
    return head, weight


@pytest.mark.parametrize("num_rows", [0, 1, 128, 129, 300])
@pytest.mark.parametrize("is_tied", [True, False])
def test_any_number_of_rows(num_rows: int, is_tied: bool) -> None:
    head, weight = make_head(torch.float32, is_tied=is_tied)
    hidden = torch.randn(num_rows, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))
    logits = head(hidden)
    torch.testing.assert_close(logits, hidden @ weight.T, atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_rows", [2, 200])
def test_half_precision_gives_float32(num_rows: int) -> None:
    head, _ = make_head(torch.bfloat16, is_tied=True)
    assert head(torch.ones(num_rows, HIDDEN_SIZE, dtype=torch.bfloat16)).dtype == torch.float32


def test_packing_twice_changes_nothing() -> None:
    head, _ = make_head(torch.float32, is_tied=False)
    hidden = torch.ones(2, HIDDEN_SIZE)
    before = head(hidden)
    head.process_weights_after_loading()
    assert torch.equal(head(hidden), before)
