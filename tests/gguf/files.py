"""Writes GGUF files with the format's own package: what transformers saved, under ggml's names and in its order."""

import json
import math
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
                 "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3",
                 "gemma4_text": "gemma4", "gemma2": "gemma2", "granite": "granite", "smollm3": "smollm3",
                 "seed_oss": "seed_oss", "phi3": "phi3"}  # fmt: skip
_MULTIPLIERS = {"attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
                "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
                "attn_logit_softcapping": "attn_logit_softcapping",
                "final_logit_softcapping": "final_logit_softcapping"}  # fmt: skip
_GEMMA4_SCALES = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}  # what the package has no name for, as transformers saves it
_EXPERT_PARTS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def convert(folder: Path, path: Path, kind: str = "F32", *, as_floats: tuple[str, ...] = (), **changes: Any) -> Path:
    """Write the checkpoint in `folder` as a GGUF file with matrices of type `kind`; `changes` are further metadata.

    Those named in `as_floats` are stored in float32.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    write_settings(writer, config)
    for key, value in changes.items():
        writer.add_key_value(key.replace("__", "."), value, _value_type(value))
    quant = gguf.GGMLQuantizationType[kind]
    for name, values in _tensors(folder, config, architecture):
        is_matrix = values.ndim > 1 and "gate_inp" not in name and name not in as_floats
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
        if values.ndim > 1 and not name.endswith(("gate.weight", "router.proj.weight")):
            tensors[name] = torch.from_numpy(dequantize(quantize(values.numpy(), quant), quant))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _value_type(value: object) -> Any:
    return gguf.GGUFValueType.get_type(value)


def write_settings(writer: Any, config: dict[str, Any]) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if config["model_type"] != "gemma4_text":
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    if config["model_type"] == "gemma4_text":
        head_dim, rope = _write_gemma4_settings(writer, config), rope["full_attention"]
    if config["model_type"] == "gemma3_text":
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"] or 0.0)
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    is_partial = config["model_type"] == "phi3"
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)) if is_partial else head_dim)
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        factor = math.log(config["max_position_embeddings"] / rope["original_max_position_embeddings"])
        own = math.sqrt(1 + factor / math.log(rope["original_max_position_embeddings"]))
        writer.add_rope_scaling_attn_factors(rope.get("attention_factor") or own)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    _write_own_settings(writer, config)


def _write_own_settings(writer: Any, config: dict[str, Any]) -> None:
    """Write what only some have."""
    if config["model_type"] in ("granite", "gemma2"):
        for key, name in _MULTIPLIERS.items():
            if key in config:
                writer.add_float32(f"{config['model_type']}.{name}", config[key])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if experts := config.get("num_experts", config.get("num_local_experts")):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.get("num_experts_per_tok") or config["top_k_experts"])
        if "moe_intermediate_size" in config:
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        if shared := config.get("shared_expert_intermediate_size"):
            writer.add_expert_shared_feed_forward_length(shared)


def _write_gemma4_settings(writer: Any, config: dict[str, Any]) -> int:
    """Write what layers of two kinds have; return the head size of those without a window."""
    num_layers, types = config["num_hidden_layers"], config["layer_types"]
    [full] = {of["head_dim"] for of in config["per_layer_config"].values()}
    own = [config["per_layer_config"].get(str(layer), {}) for layer in range(num_layers)]
    kv_heads = [of.get("num_key_value_heads", config["num_key_value_heads"]) for of in own]
    shared = num_layers - config["num_kv_shared_layers"]
    sizes = [config["intermediate_size"]] * shared
    sizes += [config["intermediate_size"] * (2 if config["use_double_wide_mlp"] else 1)] * (num_layers - shared)
    writer.add_feed_forward_length(sizes)
    writer.add_head_count_kv(kv_heads)
    for key, size in (("key_length", full), ("value_length", full)):
        writer.add_uint32(f"gemma4.attention.{key}", size)
        writer.add_uint32(f"gemma4.attention.{key}_swa", config["head_dim"])
    writer.add_uint32("gemma4.attention.shared_kv_layers", config["num_kv_shared_layers"])
    writer.add_uint32("gemma4.embedding_length_per_layer_input", config["hidden_size_per_layer_input"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in types])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"] or 0.0)
    return int(full)


def _rotary_tensors(config: dict[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
    """Return what frequencies are divided by, where files have it as tensors."""
    rope = config["rope_parameters"]
    if config["model_type"] == "gemma4_text":
        width = max(of["head_dim"] for of in config["per_layer_config"].values())
        num_rotated = int(rope["full_attention"]["partial_rotary_factor"] * width // 2)
        factors = [1.0] * num_rotated + [1e30] * (width // 2 - num_rotated)
        return {"rope_freqs.weight": np.array(factors, np.float32)}
    kinds = [kind for kind in ("short", "long") if rope.get(f"{kind}_factor") is not None]
    return {f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32) for kind in kinds}


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
        if architecture in ("gemma2", "gemma3") and part.endswith("norm"):
            values = values + np.float32(1)
        if architecture in ("llama", "granite", "smollm3") and part in heads:
            values = permuted(values, heads[part])
        if name.endswith(tuple(_GEMMA4_SCALES)):
            layer, _, rest = name.removeprefix("model.layers.").partition(".")
            written[f"blk.{layer}.{_GEMMA4_SCALES[rest]}"] = values
            continue
        if ".experts." in name:
            layer, number, part = name.split(".")[2], int(name.split(".")[-3]), name.split(".")[-2]
            experts.setdefault(f"blk.{layer}.ffn_{_EXPERT_PARTS[part]}_exps.weight", {})[number] = values
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        written[found] = values
    written |= _rotary_tensors(config)
    for name, each in experts.items():
        written[name] = np.stack([each[number] for number in sorted(each)])
    return list(written.items())


def permuted(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Put the two halves of each head's rows side by side, pair by pair, as files of Llama have them."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
