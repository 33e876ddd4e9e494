"""Launchers of maps and experts with weights of few bits, and of adapters: once for each variant that differs much."""

from dataclasses import replace

import torch

from octavo.kernels.quantization import Float8Format, IntegerFormat, PlainFormat
from octavo.kernels.quantize import quantize
from octavo.kernels.reference import Kernels
from octavo.kernels.triton.integer_rows import integer_rows
from octavo.kernels.triton.lora import add_lora
from octavo.kernels.triton.low_bit_experts import pack_low_bit_experts
from octavo.kernels.triton.low_bit_weight import LowBitLinear, pack_low_bit
from octavo.kernels.triton.matmul import low_bit_linear, weight_only_linear
from octavo.kernels.types import SILU, Fused

_INT8 = IntegerFormat(bits=8, group_size=None, rotation="row")
_INT4 = IntegerFormat(bits=4, group_size=None, is_two_level=True, rotation="blocks")
_GROUPS, _SMALL_GROUPS = (IntegerFormat(bits=4, group_size=size) for size in (128, 32))
_SOME_ROWS = (1, 64, 8192)
_NUM_EXPERTS = 8
_SOME_PAIRS = tuple(_NUM_EXPERTS * num_rows for num_rows in _SOME_ROWS)


def launch_all(capability: int) -> None:
    for num_rows in _SOME_ROWS:
        x = torch.zeros(num_rows, 256, dtype=torch.bfloat16)
        for form in (_INT8, _INT4, _GROUPS):
            low_bit_linear(x, _packed(form), torch.bfloat16, one_tiling=False)
        with_offsets: list[tuple[PlainFormat, bool]] = [
            (Float8Format(), False),
            (_GROUPS, True),
            (_SMALL_GROUPS, True),
        ]
        for kind, has_offsets in with_offsets:
            weight_only_linear(x, _packed(kind, has_offsets=has_offsets), torch.bfloat16, one_tiling=False)
        for kind, has_offsets in with_offsets:
            packed = _packed(kind, has_offsets=has_offsets)
            weight_only_linear(x.float(), packed, torch.float32, one_tiling=False)
    for size in (1024, 12288):
        rows, weight = torch.zeros(2, size, dtype=torch.bfloat16), torch.zeros(size, dtype=torch.bfloat16)
        integer_rows(rows, size, "row", fused=Fused(residual=rows, norm_weight=weight, eps=1e-6))
        integer_rows(rows, size // 2, "blocks", activation=SILU)
    for num_pairs in _SOME_PAIRS:
        for kind in (_INT8, _INT4, Float8Format()):
            _launch_experts(kind, num_pairs, [128] * _NUM_EXPERTS, torch.bfloat16)
    _launch_experts(Float8Format(), _SOME_PAIRS[1], [128] * _NUM_EXPERTS, torch.float32)
    _launch_experts(
        _INT4, _SOME_PAIRS[0], [37, 37, 101], torch.bfloat16
    )  # with biases, and a larger one that is shared
    for rank in (8, 64):
        _launch_lora(rank, torch.bfloat16)
    _launch_lora(16, torch.float32)


def _packed(form: PlainFormat, *, has_offsets: bool = False) -> LowBitLinear:
    weight = quantize(torch.ones(256, 256), form)
    return pack_low_bit(replace(weight, offsets=weight.scales if has_offsets else None), None)


def _launch_experts(form: PlainFormat, num_pairs: int, sizes: list[int], dtype: torch.dtype) -> None:
    bias = torch.zeros(256, dtype=dtype) if len(set(sizes)) > 1 else None
    experts = pack_low_bit_experts(
        [pack_low_bit(quantize(torch.ones(2 * size, 256), form), bias) for size in sizes],
        [pack_low_bit(quantize(torch.ones(256, size), form), bias) for size in sizes],
        one_tiling=False,
    )
    ids = torch.zeros(num_pairs, dtype=torch.int64)
    experts.compute_rows(torch.zeros(3, 256, dtype=dtype), ids, ids, SILU)


def _launch_lora(rank: int, dtype: torch.dtype) -> None:
    device = torch.get_default_device()
    adapters = Kernels().empty_lora(4, rank, 1024, (1024, 512, 512), dtype=dtype, device=device)
    base, x = torch.zeros(3, 2048, dtype=dtype), torch.zeros(3, 1024, dtype=dtype)
    add_lora(base, x, adapters, torch.zeros(3, dtype=torch.int64))
