"""Every quantized type against ggml's own Python package, on random bytes: bit for bit."""

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize as expected_numbers

from octavo.gguf.types import DECODED_TYPES, GGML_TYPES, READ_TYPES, GgmlType
from octavo.kernels.blocks import dequantize, unpack

QUANTIZED = [kind for kind in GGML_TYPES.values() if kind.block_size > 1]


def random_rows(kind: GgmlType, num_rows: int = 6, size: int = 1024) -> np.ndarray:
    """Return rows of bytes; scales, which are float16, are finite."""
    data = np.random.default_rng(3).integers(0, 256, (num_rows, kind.row_bytes(size)), dtype=np.uint8)
    if kind.name == "MXFP4":
        exponents = data.reshape(num_rows, -1, kind.block_bytes)[..., 0]
        exponents %= 250  # the largest overflow
        return data
    halves = data.view(np.uint16)
    halves[(halves & 0x7C00) == 0x7C00] &= 0xBFFF
    return data


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_numbers_are_those_of_ggml(kind: GgmlType) -> None:
    rows = random_rows(kind)
    found = dequantize(torch.from_numpy(rows), kind)
    assert found.numpy().tobytes() == expected_numbers(rows, gguf.GGMLQuantizationType[kind.name]).tobytes()


@pytest.mark.parametrize("kind", DECODED_TYPES.values(), ids=lambda kind: kind.name)
def test_types_that_the_package_decodes(kind: GgmlType) -> None:
    found = dequantize(torch.from_numpy(random_rows(kind)), kind)
    assert found.shape == (6, 1024)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_quants_fit_eight_bits(kind: GgmlType) -> None:
    quants, scales, _ = unpack(torch.from_numpy(random_rows(kind)), kind)
    assert quants.dtype == torch.int8
    assert scales.shape[1] in (1024 // 16, 1024 // 32)


def test_sizes_are_those_of_ggml() -> None:
    for number, kind in READ_TYPES.items():
        assert gguf.GGMLQuantizationType[kind.name] == number
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.name]] == (kind.block_size, kind.block_bytes)
