"""Logits: float32, in slices without a seam, and from the embedding's own table when tied."""

import pytest
import torch
from tests.models.paged import make_context

from octavo.kernels.dispatch import is_built, native_kernels
from octavo.layers.vocabulary import Embedding, LogitsHead

HIDDEN_SIZE, VOCAB_SIZE = 24, 50


def make_head(dtype: torch.dtype, *, is_tied: bool) -> tuple[LogitsHead, torch.Tensor]:
    """Return a head and its weight [V, D]."""
    head, _, weight = make_both(dtype, is_tied=is_tied)
    return head, weight


def make_both(
    dtype: torch.dtype, *, is_tied: bool, quantization: str | None = None
) -> tuple[LogitsHead, Embedding, torch.Tensor]:
    """Return a head, an embedding, and the weight [V, D] of both."""
    context = make_context(dtype, quantization=quantization)
    weight = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)
    embedding = Embedding(VOCAB_SIZE, HIDDEN_SIZE, context=context, has_tied_head=is_tied)
    embedding.load_weight("weight", weight)
    head = LogitsHead(HIDDEN_SIZE, VOCAB_SIZE, tied_to=embedding if is_tied else None, context=context)
    assert set(head.checkpoint_tensors()) == (set() if is_tied else {"weight"})
    if not is_tied:
        head.load_weight("weight", weight)
    head.process_weights_after_loading()
    return head, embedding, weight


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


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_an_embedding_gives_the_rows_that_were_loaded(is_tied: bool, quantization: str | None) -> None:
    """Whatever becomes of the head's weight: packed, shared, in integers."""
    if quantization is not None and not is_built():
        pytest.skip("integers want the C++ kernels")
    _, embedding, weight = make_both(torch.bfloat16, is_tied=is_tied, quantization=quantization)
    ids = torch.tensor([0, 49, 7, 7, 31, 32])
    assert torch.equal(embedding(ids), weight[ids])


@pytest.mark.skipif(native_kernels() is None, reason="the C++ kernels were not built, or are switched off")
def test_a_tied_weight_is_in_memory_once() -> None:
    head, embedding, _ = make_both(torch.bfloat16, is_tied=True)
    assert embedding.packed is head.packed
    assert head.packed_tensors() == {}
    tensors = embedding.packed_tensors()
    assert tensors is not None
    assert [tensor is head.packed.weight for tensor in tensors.values()] == [True]
