"""GGUF files of Gemma 3: what llama.cpp's converter leaves out, because llama.cpp's own code knows it."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from octavo.config.hf import read_model_config
from octavo.config.model import ModelConfig
from octavo.errors import CheckpointError, UnsupportedModelError

TOKENS = ("<pad>", "<eos>", "<bos>", "<end_of_turn>")


def write(path: Path, architecture: str = "gemma3", tokens: tuple[str, ...] = TOKENS, **changes: Any) -> Path:
    """Write settings and an embedding, without layers; a `None` leaves a key out."""
    settings: dict[str, Any] = {
        "context_length": 131072, "embedding_length": 64, "feed_forward_length": 96, "block_count": 8,
        "attention__head_count": 4, "attention__head_count_kv": 2, "attention__key_length": 32,
        "attention__value_length": 32, "attention__layer_norm_rms_epsilon": 1e-6, "rope__freq_base": 1e6,
        "attention__sliding_window": 512, **changes,
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in settings.items():
        if value is not None:
            writer.add_key_value(f"{architecture}.{key.replace('__', '.')}", value, gguf.GGUFValueType.get_type(value))
    writer.add_token_list(tokens)
    writer.add_eos_token_id(1)
    writer.add_tensor("token_embd.weight", np.zeros((4, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(tmp_path: Path, **changes: Any) -> ModelConfig:
    return read_model_config(write(tmp_path / "model.gguf", **changes), model="m")


def test_what_files_leave_out_is_that_of_the_published_models(tmp_path: Path) -> None:
    found = read(tmp_path)
    assert found.sliding_windows == (512,) * 5 + (None,) + (512,) * 2
    whole, local = (table.rope for table in found.rotary)
    assert (whole.theta, local.theta) == (1e6, 1e4)
    assert found.attention(0).scale == pytest.approx(32**-0.5)
    assert found.logits_soft_cap is None
    assert found.eos_token_ids == (1, 3)


def test_tokens_that_end_answers_are_known_by_their_text(tmp_path: Path) -> None:
    tokens = ("<|eot_id|>", "</s>", "<|im_end|>", "<|eom_id|>")
    found = read_model_config(write(tmp_path / "model.gguf", "llama", tokens), model="m")
    assert found.eos_token_ids == (1, 0, 2, 3)


def test_what_they_say_holds(tmp_path: Path) -> None:
    said = {"rope__freq_base_swa": 500.0, "final_logit_softcapping": 30.0, "rope__scaling__factor": 8.0}
    found = read(tmp_path, attention__sliding_window_pattern=2, rope__scaling__type="linear", **said)
    assert found.sliding_windows == (512, None) * 4
    whole, local = (table.rope for table in found.rotary)
    assert (local.theta, local.kind, found.logits_soft_cap) == (500.0, "default", 30.0)
    assert (whole.kind, whole.factor) == ("linear", 8.0)
    assert read(tmp_path, attention__sliding_window=None).sliding_windows == (None,) * 8
    assert read(tmp_path, block_count=62).attention(0).scale == pytest.approx((64 / 4) ** -0.5)  # as in Gemma 3 27B


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gemma3: attention\.sliding_window_pattern=.*for each of 8 layers"):
        read(tmp_path, attention__sliding_window_pattern=[True, False])
    with pytest.raises(CheckpointError, match=r"gemma3: block_count='many': an integer is expected"):
        read(tmp_path, block_count="many")


def test_a_vision_projector_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"mmproj\.gguf: an image projector \(mmproj\) without a language"):
        read_model_config(write(tmp_path / "mmproj.gguf", "clip"), model="m")
