"""A checkpoint of real geometry with random weights, as files: what every engine of a comparison reads.

    python -m benchmarks.peers.checkpoint FOLDER [--seed 0]

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

from benchmarks.geometry import QWEN3_0_6B, write_checkpoint


def shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor of a Qwen3 checkpoint, in the order in which they are drawn."""
    hidden, head = config["hidden_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    inner = config["intermediate_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        part = f"model.layers.{layer}."
        yield part + "input_layernorm.weight", (hidden,)
        yield part + "self_attn.q_proj.weight", (query, hidden)
        yield part + "self_attn.k_proj.weight", (key, hidden)
        yield part + "self_attn.v_proj.weight", (key, hidden)
        yield part + "self_attn.q_norm.weight", (head,)
        yield part + "self_attn.k_norm.weight", (head,)
        yield part + "self_attn.o_proj.weight", (hidden, query)
        yield part + "post_attention_layernorm.weight", (hidden,)
        yield part + "mlp.gate_proj.weight", (inner, hidden)
        yield part + "mlp.up_proj.weight", (inner, hidden)
        yield part + "mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Return norms of one, and matrices that keep the variance of what passes through them, in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes(config):
        if len(shape) == 1:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
            continue
        bound = math.sqrt(3.0 / shape[1])
        tensors[name] = torch.empty(shape).uniform_(-bound, bound, generator=generator).to(torch.bfloat16)
    return tensors


def make(folder: Path, seed: int = 0) -> Path:
    """Write the checkpoint to `folder` if there is none yet; return it."""
    weights = folder / "model.safetensors"
    if not weights.exists():
        write_checkpoint(folder, QWEN3_0_6B)
        save_file(random_tensors(QWEN3_0_6B, seed), folder / "new.safetensors", metadata={"format": "pt"})
        (folder / "new.safetensors").rename(weights)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": QWEN3_0_6B["eos_token_id"]}))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make(options.folder, options.seed)


if __name__ == "__main__":
    main()
