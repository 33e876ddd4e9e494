"""Tokens drawn without asking the device: those of the sampler, row by row."""

import numpy as np
import pytest
import torch

from octavo.sampling import plain_draw
from octavo.sampling.noise import NoiseKeys
from octavo.sampling.plain_draw import draw_plain
from octavo.sampling.rows import SamplingRows
from octavo.sampling.sampler import Sampler
from octavo.sampling_params import SamplingParams

VOCAB_SIZE, NUM_ROWS = 301, 9


def test_tokens_are_the_samplers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_draw, "_SLICE", 4 * VOCAB_SIZE)  # slices of 4, 4 and 1
    rows = SamplingRows(NUM_ROWS, VOCAB_SIZE, "cpu")
    for row in range(NUM_ROWS):
        params = SamplingParams(temperature=(0.0, 0.3, 1.0)[row % 3], seed=2**63 + 977 * row)
        rows.add(row, params, [], [], np.zeros(1, dtype=np.int32), 1)
    logits = torch.randn(NUM_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 3
    logits[3] = logits[3].round()  # ties
    ids = np.arange(NUM_ROWS, dtype=np.int32)
    records, sampler = rows.records(ids), Sampler(rows)
    assert sampler.takes_plain(ids)
    column = {name: torch.from_numpy(records[name].copy()) for name in ("temperature", "seed_low", "seed_high")}
    for index in (0, 5):
        keys = NoiseKeys(
            seed_low=column["seed_low"],
            seed_high=column["seed_high"],
            output_indices=torch.full((NUM_ROWS,), index),
        )
        largest, tokens = draw_plain(logits, column["temperature"], keys)
        wanted = sampler.sample(logits, ids, np.full(NUM_ROWS, index, dtype=np.int32))
        assert tokens.tolist() == wanted.token_ids.tolist()
        assert torch.equal(largest, logits.amax(-1))


@pytest.mark.parametrize("special", [{"top_k": 3}, {"logprobs": 0}, {"presence_penalty": 1.0}])
def test_other_wishes_are_the_samplers_own(special: dict[str, float]) -> None:
    rows = SamplingRows(2, VOCAB_SIZE, "cpu")
    for row, options in enumerate(({}, special)):
        params = SamplingParams.from_options({"temperature": 1.0, "seed": 3, **options})
        rows.add(row, params, [], [], np.zeros(1, dtype=np.int32), 1)
    sampler = Sampler(rows)
    assert sampler.takes_plain(np.array([0], dtype=np.int32))
    assert not sampler.takes_plain(np.array([0, 1], dtype=np.int32))
