"""Writes GGUF files with the format's own package: what transformers saved, under ggml's names and in its order."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
                 "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}  # fmt: skip
_EXPERT_PARTS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def convert(folder: Path, path: Path, kind: str = "F32", **changes: Any) -> Path:
    """Write the checkpoint in `folder` as a GGUF file with matrices of type `kind`; `changes` are further metadata."""
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    _write_settings(writer, config)
    for key, value in changes.items():
        writer.add_key_value(key.replace("__", "."), value, _value_type(value))
    quant = gguf.GGMLQuantizationType[kind]
    for name, values in _tensors(folder, config, architecture):
        is_matrix = values.ndim > 1 and "gate_inp" not in name
        data = quantize(values, quant) if is_matrix else values
        writer.add_tensor(name, data, raw_dtype=quant if is_matrix else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path: Path) -> gguf.GGUFReader:
    """Read a file with the package, from memory: to look at each string of a memory map takes it twice as long."""
    with patch.object(np, "memmap", lambda path, mode: np.fromfile(path, np.uint8)):
        return gguf.GGUFReader(path)


def round_matrices(folder: Path, kind: str) -> None:
    """Round the matrices of a checkpoint to what a GGUF file of type `kind` holds."""
    quant = gguf.GGMLQuantizationType[kind]
    tensors = load_file(folder / "model.safetensors")
    for name, values in tensors.items():
        if values.ndim > 1 and not name.endswith("gate.weight"):
            tensors[name] = torch.from_numpy(dequantize(quantize(values.numpy(), quant), quant))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _value_type(value: object) -> Any:
    return gguf.GGUFValueType.get_type(value)


def _write_settings(writer: Any, config: dict[str, Any]) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    if config["model_type"] == "gemma3_text":
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"] or 0.0)
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if experts := config.get("num_experts", config.get("num_local_experts")):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if "moe_intermediate_size" in config:
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        if shared := config.get("shared_expert_intermediate_size"):
            writer.add_expert_shared_feed_forward_length(shared)


def _tensors(folder: Path, config: dict[str, Any], architecture: str) -> list[tuple[str, npt.NDArray[np.float32]]]:
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config["num_hidden_layers"]
    )
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    written: dict[str, npt.NDArray[np.float32]] = {}
    experts: dict[str, dict[int, npt.NDArray[np.float32]]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.numpy()
        part = name.split(".")[-2]
        if architecture == "gemma3" and part.endswith("norm"):
            values = values + np.float32(1)
        if architecture == "llama" and part in heads:
            values = permuted(values, heads[part])
        if ".experts." in name:
            layer, number, part = name.split(".")[2], int(name.split(".")[-3]), name.split(".")[-2]
            experts.setdefault(f"blk.{layer}.ffn_{_EXPERT_PARTS[part]}_exps.weight", {})[number] = values
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        written[found] = values
    for name, each in experts.items():
        written[name] = np.stack([each[number] for number in sorted(each)])
    return list(written.items())


def permuted(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Put the two halves of each head's rows side by side, pair by pair, as files of Llama have them."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
