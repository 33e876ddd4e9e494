"""Attention of encoders: backends compute what torch's op does, and each segment by itself."""

import pytest
import torch
from tests.breadth import pick
from tests.kernels.levels import LEVELS

from octavo.attention.base import EncoderHeads, EncoderSegments
from octavo.attention.native import NativeAttention
from octavo.kernels.native import NativeKernels

HEADS = EncoderHeads(count=3, size=20)
LENGTHS = [64, 64, 1, 40, 300, 64]  # of windows, of what is left at edges, and of more than one block


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    """One ISA level of the C++ kernels."""
    return str(request.param)


@pytest.mark.parametrize("dtype", pick([torch.float32], [torch.float32, torch.bfloat16]), ids=str)
@pytest.mark.parametrize("is_rotated", [True, False])
def test_segments(level: str, dtype: torch.dtype, is_rotated: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    num_rows = sum(LENGTHS)
    qkv = torch.randn(num_rows, 3 * HEADS.count * HEADS.size, generator=generator).to(dtype)
    angles = torch.randn(num_rows, HEADS.size // 2, generator=generator)
    rotary = (angles.cos(), angles.sin()) if is_rotated else None
    # Memory that is int8 for a decoder is not for an encoder.
    backend = NativeAttention(NativeKernels(level, 2, dtype), dtype, torch.int8)
    with torch.inference_mode():
        segments = backend.of_segments(LENGTHS, rotary)
        found = segments.attend(qkv, HEADS)
        expected = EncoderSegments(LENGTHS, rotary).attend(qkv, HEADS)
        tolerance = 1e-5 if dtype == torch.float32 else 0.03
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
        assert torch.equal(segments.attend(qkv, HEADS), found), "the next layer reuses the memory"
        rows = slice(sum(LENGTHS[:4]), sum(LENGTHS[:5]))
        alone = backend.of_segments(LENGTHS[4:5], rotary and (rotary[0][rows], rotary[1][rows]))
        assert torch.equal(alone.attend(qkv[rows], HEADS), found[rows])
