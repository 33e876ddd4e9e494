"""Launchers of the sampler's kernels, and of maps with one order of summation, called once for each variant."""

import torch

from octavo.kernels.triton.draw import draw, thresholds
from octavo.kernels.triton.logits import process_logits, rate
from octavo.kernels.triton.matmul import matmul


def launch_all(capability: int) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for num_rows in (1, 8192):
            matmul(torch.zeros(num_rows, 256, dtype=dtype), torch.zeros(1024, 256, dtype=dtype), None)
            matmul(torch.zeros(num_rows, 100, dtype=dtype), torch.zeros(129, 100, dtype=dtype), torch.zeros(129))
    words, ones = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.float64)
    logits, largest = torch.zeros(2, 151936), torch.zeros(2)
    draw(logits, largest, ones, words, words, words)
    draw(logits, largest, ones, words, words, words, thresholds(logits, largest, ones, words, ones), ones)
    rate(logits, largest, largest, words, 20)
    table, masks = torch.zeros(3, 4096, dtype=torch.int32), torch.zeros(2, 151936 // 32, dtype=torch.int32)
    process_logits(logits, (table, words, words, words), 512, (ones, ones, ones), words, masks)
