"""Tiny gpt-oss with experts in MXFP4: as a checkpoint has them, and as a GGUF file has them."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from tests.gguf.files import write_settings
from tests.models.tiny import TINY_MODELS, TinyModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

SIZES = {"hidden_size": 96, "intermediate_size": 64, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}


def case(**settings: Any) -> TinyModel:
    """Return the tiny model in sizes that MXFP4 has blocks for."""
    [found] = [case for case in TINY_MODELS if case.name == "gpt-oss"]
    return TinyModel(name="gpt-oss-mxfp4", family="GptOss", settings={**found.settings, **SIZES, **settings})


def save_mxfp4(folder: Path, seed: int = 0, **settings: Any) -> Any:
    """Save a checkpoint with random codes and exponents; return transformers' model of their values in float32."""
    model = case(**settings).save(folder, seed)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, in_size, num_outputs = tensors.pop(name).shape
        shape = experts, num_outputs, in_size // 32
        codes = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        exponents = torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": exponents}
        values = convert_moe_packed_tensors(codes, exponents, dtype=torch.float32)
        model.get_parameter(name).data.copy_(values)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def write_gguf(folder: Path, path: Path) -> Path:
    """Write a checkpoint as llama.cpp's converter does: the experts' codes as they are, all else in float32."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "gpt-oss")
    write_settings(writer, config)
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, config["num_hidden_layers"])
    tensors = {name: tensor.numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name, values in tensors.items():
        if ".experts." not in name:
            found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert found is not None, name
            writer.add_tensor(f"{found}.weight" if name.endswith("sinks") else found, values)
    for stem in sorted({name.rpartition("_proj")[0] for name in tensors if ".experts." in name}):
        parts = ("down",) if stem.endswith(".down") else ("gate", "up")
        place = f"blk.{stem.split('.')[2]}.ffn"
        for at, part in enumerate(parts):
            rows = slice(at, None, len(parts))
            writer.add_tensor(f"{place}_{part}_exps.bias", tensors[f"{stem}_proj_bias"][:, rows].copy())
            if f"{stem}_proj" in tensors:
                values = tensors[f"{stem}_proj"].swapaxes(1, 2)[:, rows]
                writer.add_tensor(f"{place}_{part}_exps.weight", np.ascontiguousarray(values))
                continue
            blocks = in_gguf_order(tensors[f"{stem}_proj_blocks"][:, rows], tensors[f"{stem}_proj_scales"][:, rows])
            kind = gguf.GGMLQuantizationType.MXFP4
            writer.add_tensor(f"{place}_{part}_exps.weight", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def in_gguf_order(codes: npt.NDArray[np.uint8], exponents: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return rows of blocks [E, N, K / 32 * 17] of codes [E, N, K / 32, 16]."""
    elements = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], 32)
    halves = elements[..., :16] | elements[..., 16:] << 4
    return np.concatenate([exponents[..., None], halves], axis=-1).reshape(*codes.shape[:2], -1)
