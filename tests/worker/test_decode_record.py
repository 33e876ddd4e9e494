"""The record of a decode step: columns are read back at fixed addresses, and the rest of a bucket is padding."""

import numpy as np
import torch
from tests.fakes.queued_device import RecordedQueue

from octavo.sampling.logits_processors import Arrays
from octavo.sampling.rows import SamplingRows
from octavo.sampling_params import SamplingParams
from octavo.worker.decode_step import DecodeRecord

VOCAB_SIZE = 5000
SOME_IDS = range(0, VOCAB_SIZE, 2)


def test_columns_arrive_and_are_padded() -> None:
    record = DecodeRecord(8, 6, 40, VOCAB_SIZE, torch.device("cpu"))
    rows, temperature = record.integers("rows", 4), record.metadata(4).temperature
    columns = {
        "rows": np.array([3, 1, 2], dtype=np.int32),
        "temperature": np.array([0.0, 0.5, 1e-300]),
        "seed_low": np.array([1, 2**32 - 1, 7]),
        "grown_rows": np.array([1], dtype=np.int32),
        "grown_blocks": np.array([9], dtype=np.int32),
    }
    record.send(RecordedQueue(), columns)
    assert rows.tolist() == [3, 1, 2, 6]
    assert temperature.tolist() == [0.0, 0.5, 1e-300, 0.0]
    assert record.integers("seed_low", 4).tolist() == [1, 2**32 - 1, 7, 0]
    assert record.integers("positions", 4).tolist() == [0, 0, 0, 0]
    assert record.integers("grown_rows", 4).tolist() == [1, 6, 6, 6]
    assert record.integers("grown_blocks", 4).tolist() == [9, 40, 40, 40]
    record.send(RecordedQueue(), {})
    assert rows.tolist() == [6, 6, 6, 6]
    assert temperature.tolist() == [0.0, 0.0, 0.0, 0.0]


def arrays_of(*params: SamplingParams, bad_words: tuple[list[int], ...] = ()) -> Arrays:
    rows = SamplingRows(len(params), VOCAB_SIZE)
    for row, wanted in enumerate(params):
        rows.set_row(row, wanted.replace(seed=0), [], bad_words, 1)
    step = rows.step(np.arange(len(params), dtype=np.int32), np.ones(len(params), dtype=np.int32))
    return {**step.arrays[1], "mask_indices": step.arrays[0]["mask_indices"]}


def test_masks_and_biases_arrive_and_the_rest_is_nothing() -> None:
    record = DecodeRecord(4, 0, 0, VOCAB_SIZE, torch.device("cpu"))
    many = arrays_of(SamplingParams(logit_bias=dict.fromkeys(SOME_IDS, -2.0)))
    record.send_processors(RecordedQueue(), many)
    few = arrays_of(SamplingParams(allowed_token_ids=[33]), SamplingParams(logit_bias={7: 1.5}))
    assert few["mask_indices"].tolist() == [0, -1]
    record.send_processors(RecordedQueue(), few)
    assert record.processors.masks[0].nonzero().tolist() == [[1]]
    assert record.processors.masks[0, 1] == 2
    assert record.processors.biased[:2].tolist() == [VOCAB_SIZE + 7, 0]
    assert record.processors.biases.nonzero().tolist() == [[0]]


def test_what_does_not_fit_is_known_before() -> None:
    biased = SamplingParams(logit_bias=dict.fromkeys(SOME_IDS, 1.0))
    assert DecodeRecord.fits({})
    assert DecodeRecord.fits(arrays_of(biased))
    assert not DecodeRecord.fits(arrays_of(biased, biased))
    banning = SamplingParams(logit_bias={1: 1.0})
    assert DecodeRecord.fits(arrays_of(banning, bad_words=([7],)))
    assert not DecodeRecord.fits(arrays_of(banning, bad_words=([7], [8, 9])))
