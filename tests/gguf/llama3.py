"""A file whose frequencies are scaled as Llama 3.1's are."""

import math
from pathlib import Path

import gguf
import numpy as np

HEAD_DIM, THETA = 64, 500000.0


def write_llama3(folder: Path, factor: float, *, wrong: bool = False) -> Path:
    """Write settings, an embedding and factors; `wrong` ones are a tenth too large."""
    writer = gguf.GGUFWriter(folder / "llama3.gguf", "llama")
    for add, value in (
        (writer.add_context_length, 131072),
        (writer.add_embedding_length, 128),
        (writer.add_block_count, 1),
        (writer.add_feed_forward_length, 32),
        (writer.add_head_count, 2),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_rope_freq_base, THETA),
    ):
        add(value)
    writer.add_tensor("token_embd.weight", np.zeros((32, 128), np.float32))
    factors = [_factor(THETA ** (-2 * index / HEAD_DIM), factor) for index in range(HEAD_DIM // 2)]
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32) * (1.1 if wrong else 1.0))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "llama3.gguf"


def _factor(frequency: float, factor: float) -> float:
    """What is between wavelengths 2048 and 8192 is blended, by how many waves 8192 positions hold."""
    waves = 8192 * frequency / (2 * math.pi)
    share = min(max((waves - 1) / 3, 0.0), 1.0)
    return 1 / ((1 - share) / factor + share)
