"""Two checkpoints of which one guesses the other's tokens with known probability, of any two sizes.

Layers compute, but add nothing to speak of: the next token follows from the last one alone, by the rows of the logits
head. Tokens fall into classes by their remainder, and a class never leaves itself; so the token that ends a prompt
chooses how often the draft model is right.

Legend: V = vocabulary, D = hidden size.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.geometry import QWEN3_0_6B, write_checkpoint

DRAFT: dict[str, Any] = {
    **QWEN3_0_6B,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_NOTHING = 1e-5  # standard deviation of what layers add
_SEED = 3


def write_pair(folder: Path, acceptances: Sequence[float]) -> tuple[Path, Path]:
    """Write a model of Qwen3-0.6B's geometry and a draft model; tokens of class c agree with `acceptances[c]`."""
    vocab_size, num_classes = QWEN3_0_6B["vocab_size"], len(acceptances)
    random = np.random.default_rng(_SEED)
    right = np.empty(vocab_size, dtype=np.int64)  # [V] what follows each token
    wrong = np.empty_like(right)
    for remainder in range(num_classes):
        members = np.arange(remainder, vocab_size, num_classes)
        order = random.permutation(members)  # one cycle: no token returns soon
        right[order] = np.roll(order, -1)
        wrong[order] = np.roll(order, -2)
    agrees = random.random(vocab_size) < np.array(acceptances)[np.arange(vocab_size) % num_classes]
    guessed = np.where(agrees, right, wrong)
    return (
        _write(folder / "model", {**QWEN3_0_6B, "tie_word_embeddings": False}, right),
        _write(folder / "draft", {**DRAFT, "tie_word_embeddings": False}, guessed),
    )


def _write(folder: Path, config: dict[str, Any], following: np.ndarray[Any, np.dtype[np.int64]]) -> Path:
    write_checkpoint(folder, config)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    generator = torch.Generator().manual_seed(_SEED)
    hidden, head_dim, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    query, key = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def normal(*shape: int, deviation: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * deviation).to(torch.bfloat16)

    table = normal(config["vocab_size"], hidden, deviation=1.0)
    head = torch.zeros_like(table)
    # Of several tokens with the same follower, the sum answers to each.
    head.index_add_(0, torch.from_numpy(following), table)
    tensors = {
        "model.embed_tokens.weight": table,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    shapes = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(config["num_hidden_layers"]):
        for name, shape in shapes.items():
            adds = name.endswith(("o_proj", "down_proj"))
            deviation = _NOTHING if adds else shape[1] ** -0.5
            tensors[f"model.layers.{layer}.{name}.weight"] = normal(*shape, deviation=deviation)
        for name, size in {"input_layernorm": hidden, "post_attention_layernorm": hidden}.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)
        for name in ("q_norm", "k_norm"):
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = torch.ones(head_dim, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
