"""GGUF files of Qwen3.5: value heads in rounds, rates of forgetting for their logarithms, norms as whole factors."""

from collections.abc import Container
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf.quants import quantize
from safetensors.torch import load_file
from tests.models.paged import PagedRunner, load
from tests.models.test_exactness import random_tokens
from tests.models.tiny import TinyModel, by_name

from octavo.kernels.dispatch import native_kernels
from octavo.layers.linear import MergedLinear
from octavo.layers.quant.gguf import BlockScheme

PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm", "q_proj": "attn_q",
    "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
    "in_proj_qkv": "attn_qkv", "in_proj_z": "attn_gate", "in_proj_b": "ssm_beta", "in_proj_a": "ssm_alpha",
    "conv1d": "ssm_conv1d", "norm": "ssm_norm", "out_proj": "ssm_out", "gate_proj": "ffn_gate", "up_proj": "ffn_up",
    "down_proj": "ffn_down", **{part: f"nextn.{part}" for part in ("eh_proj", "enorm", "hnorm", "shared_head_norm")},
}  # fmt: skip
OF_VALUES = ("attn_gate", "ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt")
EVEN = {  # whole blocks of 32, and as many value heads as key heads
    "hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 4, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip


def in_rounds(rows: npt.NDArray[Any], num_keys: int, rounds: int) -> npt.NDArray[Any]:
    """Return rows by value head in the order of files: head h uses key head h modulo their number."""
    return np.swapaxes(rows.reshape(num_keys, rounds, -1, *rows.shape[1:]), 0, 1).reshape(rows.shape)


def write_settings(writer: Any, config: Any, num_next: int) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers + num_next)
    if num_next:
        writer.add_nextn_predict_layers(num_next)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)


def is_in(name: str, blocks: Container[int]) -> bool:
    _, kind, number, *_ = f"{name}...".split(".")
    return kind != "layers" or int(number) in blocks


def write(
    folder: Path, path: Path, config: Any, kind: str = "F32", *, num_next: int = 0, blocks: Container[int] = range(99)
) -> Path:
    """Write the checkpoint in `folder` as llama.cpp's converter would; some layers, the last `num_next` a head's."""
    num_keys, num_values = config.linear_num_key_heads, config.linear_num_value_heads
    rounds, keys = num_values // num_keys, 2 * num_keys * config.linear_key_head_dim
    writer, quant = gguf.GGUFWriter(path, "qwen35"), gguf.GGMLQuantizationType[kind]
    write_settings(writer, config, num_next)
    found = load_file(folder / "model.safetensors")
    for name in filter(lambda name: is_in(name, blocks), found):
        values, steps = found[name].numpy(), name.split(".")
        if steps[1] != "layers":
            target = {"embed_tokens": "token_embd.weight", "norm": "output_norm.weight"}.get(steps[1], "output.weight")
        elif steps[-1] == "A_log":
            target, values = f"blk.{steps[2]}.ssm_a", -np.exp(values)
        elif steps[-1] == "dt_bias":
            target = f"blk.{steps[2]}.ssm_dt.bias"
        else:
            target = f"blk.{steps[2]}.{PARTS[steps[-2]]}.{steps[-1]}"
        part = target.split(".")[2] if target.startswith("blk") else target
        if "norm" in target and part != "ssm_norm":
            values = values + np.float32(1)
        if part == "ssm_conv1d":
            values = values[:, 0]
        if part in OF_VALUES:
            values = in_rounds(values, num_keys, rounds)
        elif part in ("attn_qkv", "ssm_conv1d"):
            values = np.concatenate((values[:keys], in_rounds(values[keys:], num_keys, rounds)))
        elif part == "ssm_out":
            values = in_rounds(values.T, num_keys, rounds).T
        values = np.ascontiguousarray(values)
        is_matrix = values.ndim > 1 and part != "ssm_conv1d"
        writer.add_tensor(
            target, quantize(values, quant) if is_matrix else values, raw_dtype=quant if is_matrix else None
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["qwen3-5", "qwen3-5-of-32-heads"])
def test_as_the_checkpoint(name: str, tmp_path: Path) -> None:
    case = by_name(name)
    if case.settings.get("attention_bias"):
        case = TinyModel(name=name, family=case.family, settings={**case.settings, "attention_bias": False})
    file = write(tmp_path, tmp_path / "model.gguf", case.save(tmp_path).config)
    tokens = random_tokens(30, seed=1)
    [expected], [found] = (PagedRunner(load(path)).step({0: tokens}) for path in (tmp_path, file))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.skipif(native_kernels() is None, reason="only the C++ kernels compute with blocks")
@pytest.mark.parametrize("num_value_heads", [2, 4])
def test_quantized(num_value_heads: int, tmp_path: Path) -> None:
    """All is computed in blocks: rows are put in another order with theirs, inputs in the order of columns."""
    settings = {**by_name("qwen3-5").settings, **EVEN, "linear_num_value_heads": num_value_heads}
    config = TinyModel(name="even", family="Qwen3_5", settings=settings).save(tmp_path).config
    file = write(tmp_path, tmp_path / "model.gguf", config, "Q8_0")
    tokens, model = random_tokens(30, seed=2), load(file, dtype="bfloat16")
    [expected], [found] = (PagedRunner(each).step({0: tokens}) for each in (load(tmp_path, dtype="bfloat16"), model))
    assert torch.nn.functional.cosine_similarity(found, expected).mean() > 0.99
    linears = [layer for layer in model.modules() if isinstance(layer, MergedLinear)]
    assert {type(layer.scheme) for layer in linears} == {BlockScheme}
