"""Muon (Jordan, 2024) in float32: torch's own computes in bfloat16, which is slow on processors without AMX."""

from collections.abc import Iterable

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Momentum whose update of each matrix is orthogonalized, and scaled to the root mean square of AdamW's."""

    def __init__(self, matrices: Iterable[Tensor], *, lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all matrices."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:  # of the tower, in a step without pictures
                    continue
                state = self.state[matrix]
                average = state.setdefault("average", torch.zeros_like(matrix))
                average.lerp_(matrix.grad, 1 - group["momentum"])
                update = orthogonalized(matrix.grad.lerp(average, group["momentum"]))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * 0.2 * max(matrix.shape) ** 0.5)


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return nearly U V^T of the singular value decomposition U S V^T, by Newton-Schulz iterations."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / (x.norm() + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if is_tall else x
