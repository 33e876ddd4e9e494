"""Checkpoint folders of real geometry without weights: `config.json` and a tokenizer, for `load_format="dummy"`."""

import json
import shutil
from pathlib import Path
from typing import Any

_DEMO = Path(__file__).parent.parent / "src" / "octavo" / "demo"

QWEN3_0_6B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}

QWEN3_5_0_8B: dict[str, Any] = {
    **QWEN3_0_6B,
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
    "bos_token_id": 248044,
    "eos_token_id": 248046,
}

QWEN3_8B: dict[str, Any] = {
    **QWEN3_0_6B,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}

QWEN3_30B_A3B: dict[str, Any] = {
    **QWEN3_0_6B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}

# What the comparison with other engines has files of.
GEOMETRIES = {"qwen3-0.6b": QWEN3_0_6B, "qwen3.5-0.8b": QWEN3_5_0_8B}


def write_checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    """Write `config` and a tokenizer to `folder`: the demo model's, filled up so that every id stands for some text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    shutil.copy(_DEMO / "tokenizer_config.json", folder / "tokenizer_config.json")
    tokenizer = json.loads((_DEMO / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    taken = {*vocab.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocab.update({f"w{token_id}": token_id for token_id in range(config["vocab_size"]) if token_id not in taken})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def attends(config: dict[str, Any], layer: int) -> bool:
    """Whether a layer keeps keys and values, rather than a state."""
    interval: int = config.get("full_attention_interval", 1)
    return (layer + 1) % interval == 0


def num_attending(config: dict[str, Any]) -> int:
    return sum(attends(config, layer) for layer in range(config["num_hidden_layers"]))


def parameter_counts(config: dict[str, Any]) -> tuple[int, int]:
    """Return (weights of all layers, weights of the embedding table, which is also the LM head here)."""
    hidden, head_dim, num_layers = config["hidden_size"], config["head_dim"], config["num_hidden_layers"]
    query, key = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    attention = hidden * (query + 2 * key) + query * hidden
    linear = 0
    if "linear_num_value_heads" in config:
        attention += hidden * query  # its gates
        channels, values, heads = linear_sizes(config)
        linear = hidden * (channels + 2 * values + 2 * heads)
    mixers = num_attending(config) * attention + (num_layers - num_attending(config)) * linear
    return mixers + num_layers * 3 * hidden * config["intermediate_size"], config["vocab_size"] * hidden


def linear_sizes(config: dict[str, Any]) -> tuple[int, int, int]:
    """Return, of a gated delta net: channels that are convolved, values, and value heads."""
    heads: int = config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    return 2 * keys + values, values, heads


def state_bytes(config: dict[str, Any]) -> int:
    """Return the memory of one request's recurrent states in all layers, in float32."""
    num_layers = config["num_hidden_layers"] - num_attending(config)
    if not num_layers:
        return 0
    _, values, _ = linear_sizes(config)
    return int(4 * num_layers * values * config["linear_key_head_dim"])


def kv_bytes_per_token(config: dict[str, Any], dtype_bytes: int = 2) -> int:
    """Return the KV memory of one token in all layers."""
    return int(2 * num_attending(config) * config["num_key_value_heads"] * config["head_dim"] * dtype_bytes)
