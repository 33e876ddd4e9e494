"""Rotations of inputs: orthogonal, their own inverse, and as wide as they are meant to be."""

import pytest
import torch

from octavo.kernels.quantization import ROTATION_BLOCK, rotated


def hadamard(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), dim=1), torch.cat((matrix, -matrix), dim=1)))
    return matrix


def test_blocks_are_multiplied_by_a_hadamard_matrix() -> None:
    x = torch.randn(5, 84, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(rotated(x, "blocks")[:, :64], x[:, :64] @ hadamard(64) / 8)
    assert torch.equal(rotated(x, "blocks")[:, 64:], x[:, 64:])
    torch.testing.assert_close(rotated(x[:, :64].repeat(1, 4), "row"), x[:, :64].repeat(1, 4) @ hadamard(256) / 16)


# 1,088 is 17 blocks: neither two nor three divide them.
@pytest.mark.parametrize(
    ("num_inputs", "num_mixed"), [(40, 1), (84, 64), (451, 64), (576, 576), (1024, 1024), (1088, 64)]
)
def test_a_row_is_mixed_by_an_orthogonal_matrix_that_undoes_itself(num_inputs: int, num_mixed: int) -> None:
    identity = torch.eye(num_inputs)
    matrix = rotated(identity, "row")
    torch.testing.assert_close(matrix @ matrix.T, identity, atol=1e-5, rtol=0)
    torch.testing.assert_close(rotated(matrix, "row"), identity, atol=1e-5, rtol=0)
    assert int((matrix[0] != 0.0).sum()) == num_mixed
    num_rotated = num_inputs // ROTATION_BLOCK * ROTATION_BLOCK
    assert torch.equal(matrix[num_rotated:], identity[num_rotated:])
