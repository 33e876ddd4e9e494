"""Launchers of the sampler's kernels, and of maps with one order of summation, called once for each variant."""

import torch

from octavo.kernels.triton.dense import dense_linear
from octavo.kernels.triton.draw import draw, thresholds
from octavo.kernels.triton.logits import process_logits, rate
from octavo.kernels.triton.one_row import one_row_linear
from octavo.kernels.types import SILU, Fused, PackedLinear


def launch_all(capability: int) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for num_rows in (1, 16, 32, 64, 8192):
            dense_linear(torch.zeros(num_rows, 256, dtype=dtype), torch.zeros(1024, 256, dtype=dtype), None)
            dense_linear(torch.zeros(num_rows, 100, dtype=dtype), torch.zeros(129, 100, dtype=dtype), torch.zeros(129))
        row, weight = torch.zeros(1, 1024, dtype=dtype), torch.zeros(512, 1024, dtype=dtype)
        packed = PackedLinear(weight=weight, bias=None, num_outputs=512)
        one_row_linear(row, packed, fused=Fused(residual=row, norm_weight=row[0], eps=1e-6))
        one_row_linear(torch.zeros(1, 2048, dtype=dtype), packed, activation=SILU)
    words, ones = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.float64)
    logits, largest = torch.zeros(2, 151936), torch.zeros(2)
    draw(logits, largest, ones, words, words, words)
    draw(logits, largest, ones, words, words, words, thresholds(logits, largest, ones, words, ones), ones)
    rate(logits, largest, largest, words, 20)
    table, masks = torch.zeros(3, 4096, dtype=torch.int32), torch.zeros(2, 151936 // 32, dtype=torch.int32)
    process_logits(logits, (table, words, words, words), 512, (ones, ones, ones), words, masks)
