"""Logits processors on the device: logits as each row's own make them, to the bit, by torch's ops and Triton's."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.triton.device import DEVICE

from octavo.contracts.schedule import TokenMasks
from octavo.kernels.triton import process_logits as module
from octavo.sampling.device_draw import FLOAT_COLUMNS, INTEGER_COLUMNS, SamplingMetadata
from octavo.sampling.device_logits_processors import (
    Context,
    LogitsProcessorTensors,
    process_logits_on_device,
    processor_arrays,
)
from octavo.sampling.rows import SamplingRows
from octavo.sampling_params import SamplingParams

VOCAB_SIZE, MAX_LEN, STOP_IDS = 77, 40, [3, 70]
# What a row asks for, its bad words, its prompt and its output.
Row = tuple[dict[str, Any], list[list[int]], list[int], list[int]]
ROWS: list[Row] = [
    ({}, [], [1, 2, 3], [4]),
    ({"repetition_penalty": 1.3}, [], [5, 5, 6, 76], [5, 9]),
    ({"presence_penalty": 0.7, "frequency_penalty": -0.3}, [], [5, 6], [9, 9, 9, 6]),
    ({"repetition_penalty": 0.7, "frequency_penalty": 1.1, "logit_bias": {9: 2.5, 8: -100.0}}, [], [9], [9, 8, 8]),
    ({"allowed_token_ids": [0, 31, 32, 63, 64, 76]}, [[31], [2, 32], [4, 63]], [2], [9, 4]),
    ({"min_tokens": 3, "logit_bias": {3: 5.0}}, [], [2], [7, 7]),
    ({"min_tokens": 2}, [[7, 7, 7, 70]], [2], [7, 7]),
    ({"presence_penalty": 2.0}, [[7, 7, 1], [7, 8, 2], [8, 3]], [7], [7, 8]),
    ({"repetition_penalty": 2.0}, [], [1], []),
]
MASKED = (0, 3, 6)  # rows under a grammar


@pytest.fixture(params=["torch", "triton"], autouse=True)
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_GPU_KERNELS", request.param)
    monkeypatch.setattr(module, "_TOKENS", 16)  # contexts and rows of several programs
    monkeypatch.setattr(module, "_IDS", 64)


def sampling_rows() -> SamplingRows:
    rows = SamplingRows(len(ROWS), VOCAB_SIZE, DEVICE)
    for row, (options, bad_words, prompt, output) in enumerate(ROWS):
        params = SamplingParams.from_options({"seed": row, **options})
        known = np.array([*prompt, *output], dtype=np.int32)
        rows.add(row, params, STOP_IDS, bad_words, known, len(prompt))
    return rows


def grammar_masks(row_ids: list[int]) -> TokenMasks:
    words = np.random.default_rng(4).integers(-(2**31), 2**31, (len(MASKED), 3), dtype=np.int32)
    at = [index for index, row in enumerate(row_ids) if row in MASKED]
    rows = [MASKED.index(row_ids[index]) for index in at]
    return TokenMasks(logits_rows=np.array(at, dtype=np.int32), words=words[rows])


def processed(logits: torch.Tensor, row_ids: list[int], masks: TokenMasks | None) -> torch.Tensor:
    """Edit as a step of these rows does."""
    rows, chosen = sampling_rows(), np.array(row_ids, dtype=np.int32)
    table = torch.full((len(ROWS), MAX_LEN), 5, dtype=torch.int32)  # what is behind a row's end means nothing
    for row, (_, _, prompt, output) in enumerate(ROWS):
        table[row, : len(prompt) + len(output)] = torch.tensor([*prompt, *output])
    num_prompt_tokens = np.array([len(ROWS[row][2]) for row in row_ids])
    output_indices = np.array([len(ROWS[row][3]) for row in row_ids])
    arrays, records = processor_arrays(rows, chosen, output_indices, masks), rows.records(chosen)
    columns = {
        **dict.fromkeys((*INTEGER_COLUMNS, *FLOAT_COLUMNS), num_prompt_tokens),
        "mask_indices": arrays.pop("mask_indices"),
        **{name: records[name].copy() for name in ("repetition", "presence", "frequency")},
    }
    context = Context(
        token_ids=table.to(DEVICE),
        rows=torch.tensor(row_ids, device=DEVICE),
        num_tokens=torch.from_numpy(num_prompt_tokens + output_indices).to(DEVICE),
        max_tokens=MAX_LEN,
    )

    def send(*arrays: np.ndarray[Any, Any]) -> list[torch.Tensor]:
        return [torch.from_numpy(array).to(DEVICE) for array in arrays]

    metadata = SamplingMetadata(**dict(zip(columns, send(*columns.values()), strict=True)))
    return process_logits_on_device(logits[row_ids], metadata, context, LogitsProcessorTensors.of(arrays, send))


def defined(logits: torch.Tensor, row: int, mask: np.ndarray[Any, Any] | None) -> torch.Tensor:
    rows, left = sampling_rows(), logits[row].clone()
    if rows.records(np.array([row]))["has_processors"][0]:
        rows.processors_of(row).apply(left, len(ROWS[row][3]))
    if mask is not None:
        bits = np.unpackbits(mask.view(np.uint8), count=VOCAB_SIZE, bitorder="little")
        left[torch.from_numpy(bits == 0).to(DEVICE)] = -torch.inf
    return left


@pytest.mark.parametrize("row_ids", [list(range(len(ROWS))), [8, 3, 1], [0], [7, 6]])
@pytest.mark.parametrize("has_grammar", [False, True])
def test_logits_are_those_of_the_rows_own_processors(row_ids: list[int], has_grammar: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(len(ROWS), VOCAB_SIZE, generator=generator) * 4).to(DEVICE)
    before, masks = logits.clone(), grammar_masks(row_ids) if has_grammar else None
    result = processed(logits, row_ids, masks)
    mask_of = {} if masks is None else dict(zip(masks.logits_rows.tolist(), masks.words, strict=True))
    for at, (left, row) in enumerate(zip(result, row_ids, strict=True)):
        torch.testing.assert_close(left, defined(logits, row, mask_of.get(at)), rtol=0, atol=0)
    assert torch.equal(logits, before)


def test_every_kind_of_edit_shows() -> None:
    """Else rows that are edited by nobody would be equal, too."""
    logits = torch.ones(len(ROWS), VOCAB_SIZE, device=DEVICE)
    changed = (processed(logits, list(range(len(ROWS))), None) != logits).sum(-1).tolist()
    assert changed == [0, 4, 2, 2, 73, 2, 0, 4, 1]
