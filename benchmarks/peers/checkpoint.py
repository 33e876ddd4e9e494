"""A checkpoint of real geometry with random weights, as files: what every engine of a comparison reads.

    python -m benchmarks.peers.checkpoint FOLDER [--geometry qwen3.5-0.8b] [--seed 0]

Writes config.json, a tokenizer and model.safetensors in bfloat16. Same seed, same bytes.
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.geometry import GEOMETRIES, attends, linear_sizes, write_checkpoint


def shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor of a Qwen3 or Qwen3.5 checkpoint, in the order in which they are drawn."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        part = f"model.layers.{layer}."
        yield part + "input_layernorm.weight", (hidden,)
        yield from attention(part + "self_attn.", config) if attends(config, layer) else delta_net(part, config)
        yield part + "post_attention_layernorm.weight", (hidden,)
        yield part + "mlp.gate_proj.weight", (inner, hidden)
        yield part + "mlp.up_proj.weight", (inner, hidden)
        yield part + "mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)


def attention(part: str, config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, head = config["hidden_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    has_gates = config["model_type"] == "qwen3_5_text"
    yield part + "q_proj.weight", (2 * query if has_gates else query, hidden)
    yield part + "k_proj.weight", (key, hidden)
    yield part + "v_proj.weight", (key, hidden)
    yield part + "q_norm.weight", (head,)
    yield part + "k_norm.weight", (head,)
    yield part + "o_proj.weight", (hidden, query)


def delta_net(part: str, config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    part, hidden = part + "linear_attn.", config["hidden_size"]
    channels, values, heads = linear_sizes(config)
    yield part + "in_proj_qkv.weight", (channels, hidden)
    yield part + "in_proj_z.weight", (values, hidden)
    yield part + "in_proj_b.weight", (heads, hidden)
    yield part + "in_proj_a.weight", (heads, hidden)
    yield part + "conv1d.weight", (channels, 1, config["linear_conv_kernel_dim"])
    yield part + "A_log", (heads,)
    yield part + "dt_bias", (heads,)
    yield part + "norm.weight", (config["linear_value_head_dim"],)
    yield part + "out_proj.weight", (hidden, values)


def constant(name: str, config: dict[str, Any]) -> float:
    """Return what a vector is full of: norms of one, however they are stored, and states that forget 5 % per token."""
    if name.endswith("dt_bias"):
        return -3.0
    is_stored_minus_one = config["model_type"] == "qwen3_5_text" and not name.endswith("linear_attn.norm.weight")
    return 0.0 if name.endswith("A_log") or is_stored_minus_one else 1.0


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Return norms of one, and matrices that keep the variance of what passes through them, in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes(config):
        if len(shape) == 1:
            tensors[name] = torch.full(shape, constant(name, config), dtype=torch.bfloat16)
            continue
        bound = math.sqrt(3.0 / math.prod(shape[1:]))
        tensors[name] = torch.empty(shape).uniform_(-bound, bound, generator=generator).to(torch.bfloat16)
    return tensors


def make(folder: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """Write a checkpoint of this geometry to `folder` if there is none yet; return it."""
    weights = folder / "model.safetensors"
    if not weights.exists():
        write_checkpoint(folder, config)
        save_file(random_tensors(config, seed), folder / "new.safetensors", metadata={"format": "pt"})
        (folder / "new.safetensors").rename(weights)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--geometry", choices=GEOMETRIES, default="qwen3-0.6b")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make(options.folder, GEOMETRIES[options.geometry], options.seed)


if __name__ == "__main__":
    main()
