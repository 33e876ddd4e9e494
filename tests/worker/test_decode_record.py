"""The record of a decode step: columns are read back at fixed addresses, and the rest of a bucket is padding."""

import numpy as np
import torch

from octavo.testing_device import RecordedQueue
from octavo.worker.decode_record import DecodeRecord


def test_columns_arrive_and_are_padded() -> None:
    record = DecodeRecord(capacity=8, scratch_row=6, scratch_block=40, device=torch.device("cpu"))
    rows, temperatures = record.integers("rows", 4), record.floats("temperatures", 4)
    columns = {
        "rows": np.array([3, 1, 2], dtype=np.int32),
        "temperatures": np.array([0.0, 0.5, 1e-300]),
        "seed_low": np.array([1, 2**32 - 1, 7]),
        "grown_rows": np.array([1], dtype=np.int32),
        "grown_blocks": np.array([9], dtype=np.int32),
    }
    record.send(RecordedQueue(), columns)
    assert rows.tolist() == [3, 1, 2, 6]
    assert temperatures.tolist() == [0.0, 0.5, 1e-300, 0.0]
    assert record.integers("seed_low", 4).tolist() == [1, 2**32 - 1, 7, 0]
    assert record.integers("positions", 4).tolist() == [0, 0, 0, 0]
    assert record.integers("grown_rows", 4).tolist() == [1, 6, 6, 6]
    assert record.integers("grown_blocks", 4).tolist() == [9, 40, 40, 40]
    record.send_padding(RecordedQueue())
    assert rows.tolist() == [6, 6, 6, 6]
    assert temperatures.tolist() == [0.0, 0.0, 0.0, 0.0]
