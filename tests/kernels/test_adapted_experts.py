"""Experts with adapters: each expert's own, for the tokens that have one; the others get what they get without."""

import pytest
import torch
from tests.kernels.conftest import native
from tests.kernels.levels import LEVEL_DTYPES
from tests.kernels.lora import Shape, adapters_of, random

from octavo.kernels.reference import ExpertAdapters, Kernels
from octavo.kernels.types import SILU, Fused, PackedExperts, Routing

SIZE, INNER, NUM_EXPERTS, ROWS = 40, 24, 3, 33
ROUTING = Routing(num_experts=NUM_EXPERTS, top_k=2, renormalizes=True, has_shared=False)
IDS = torch.arange(ROWS) % 3 - 1
UP = Shape(in_size=SIZE, parts=(INNER, INNER), max_rank=4, ranks=(4, 3))
DOWN = Shape(in_size=INNER, parts=(SIZE,), max_rank=4, ranks=(2, 4))


class Layer:
    """Experts with random weights and adapters, for some kernels."""

    def __init__(self, kernels: Kernels, dtype: torch.dtype) -> None:
        self.kernels, self.dtype = kernels, dtype
        self.x, self.residual = random(ROWS, SIZE, dtype=dtype), random(SIZE, ROWS, dtype=dtype).T.contiguous()
        self.norm = random(SIZE, dtype=dtype)
        self.router = kernels.pack_linear(random(NUM_EXPERTS, SIZE, dtype=dtype), None, "router")
        weights = [random(2 * INNER + 1, SIZE + number, dtype=dtype) * 0.3 for number in range(NUM_EXPERTS)]
        self.experts: PackedExperts = kernels.pack_experts(
            [kernels.pack_linear(weight[1:, :SIZE].contiguous(), None, "gated") for weight in weights],
            [kernels.pack_linear(weight[:INNER, :SIZE].T.contiguous(), None) for weight in weights],
        )
        slots = [adapters_of(kernels, shape, dtype) for shape in (UP, DOWN) for _ in range(NUM_EXPERTS)]
        for number, of in enumerate(slots):
            of.down.mul_(1.0 + number / 10)  # each expert has adapters of its own
        self.gate_up, self.down = tuple(slots[:NUM_EXPERTS]), tuple(slots[NUM_EXPERTS:])

    def plain(self) -> torch.Tensor:
        load = torch.zeros(NUM_EXPERTS, dtype=torch.int64)
        return self.kernels.moe(self.x, self._fused(slice(None)), self.router, ROUTING, self.experts, load)[0]

    def adapted(self, ids: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
        load = torch.zeros(NUM_EXPERTS, dtype=torch.int64)
        adapters = ExpertAdapters(gate_up=self.gate_up, down=self.down, adapter_ids=ids[rows])
        out, total = self.kernels.moe(
            self.x[rows], self._fused(rows), self.router, ROUTING, self.experts, load, adapters=adapters
        )
        assert load.sum() == 2 * len(out)
        assert torch.equal(total, (self.x + self.residual)[rows])
        return out

    def _fused(self, rows: slice) -> Fused:
        return Fused(residual=self.residual[rows], norm_weight=self.norm, eps=1e-5, activation=SILU)


@pytest.mark.parametrize(("level", "dtype"), LEVEL_DTYPES, ids=str)
def test_experts_with_adapters(level: str, dtype: torch.dtype) -> None:
    layer, reference = Layer(native(level, 2, dtype), dtype), Layer(Kernels(), dtype)
    found, plain = layer.adapted(IDS), layer.plain()
    tolerance = 8 * torch.finfo(dtype).eps + 4e-6
    torch.testing.assert_close(found, reference.adapted(IDS), rtol=tolerance, atol=tolerance)
    assert torch.equal(found[IDS < 0], plain[IDS < 0])
    assert not torch.isclose(found[IDS >= 0], plain[IDS >= 0]).all(dim=-1).any()
    for row in range(0, ROWS, 5):
        assert torch.equal(layer.adapted(IDS, slice(row, row + 1)), found[row : row + 1])
