"""The record of a step's logits processors: what fits is read back in place and replaces the previous step's."""

import numpy as np
import torch

from octavo.sampling.device_logits_processors import Arrays, processor_arrays
from octavo.sampling.rows import SamplingRows
from octavo.sampling_params import SamplingParams
from octavo.testing_device import RecordedQueue
from octavo.worker.decode_record import LogitsProcessorRecord

VOCAB_SIZE = 5000
SOME_IDS = range(0, VOCAB_SIZE, 2)


def arrays_of(*params: SamplingParams, bad_words: tuple[list[int], ...] = ()) -> Arrays:
    rows = SamplingRows(len(params), VOCAB_SIZE, "cpu", processors_on_device=True)
    for row, wanted in enumerate(params):
        rows.add(row, wanted.replace(seed=0), [], bad_words, np.zeros(1, dtype=np.int32), 1)
    return processor_arrays(rows, np.arange(len(params), dtype=np.int32), np.zeros(len(params), dtype=np.int64), None)


def test_masks_and_biases_arrive_and_the_rest_is_nothing() -> None:
    record = LogitsProcessorRecord(4, VOCAB_SIZE, torch.device("cpu"))
    many = arrays_of(SamplingParams(logit_bias=dict.fromkeys(SOME_IDS, -2.0)))
    record.send(RecordedQueue(), many)
    few = arrays_of(SamplingParams(allowed_token_ids=[33]), SamplingParams(logit_bias={7: 1.5}))
    assert few["mask_indices"].tolist() == [0, -1]
    record.send(RecordedQueue(), few)
    assert record.processors.masks[0].nonzero().tolist() == [[1]]
    assert record.processors.masks[0, 1] == 2
    assert record.processors.biased[:2].tolist() == [VOCAB_SIZE + 7, 0]
    assert record.processors.biases.nonzero().tolist() == [[0]]


def test_what_does_not_fit_is_known_before() -> None:
    biased = SamplingParams(logit_bias=dict.fromkeys(SOME_IDS, 1.0))
    assert LogitsProcessorRecord.fits({})
    assert LogitsProcessorRecord.fits(arrays_of(biased))
    assert not LogitsProcessorRecord.fits(arrays_of(biased, biased))
    banning = SamplingParams(logit_bias={1: 1.0})
    assert LogitsProcessorRecord.fits(arrays_of(banning, bad_words=([7],)))
    assert not LogitsProcessorRecord.fits(arrays_of(banning, bad_words=([7], [8, 9])))
