"""Writes GGUF files of families with small differences, under ggml's names, as llama.cpp's converter does."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import quantize
from safetensors.torch import load_file
from tests.gguf.files import permuted

Values = npt.NDArray[np.float32]
ARCHITECTURES = {
    "olmo2": "olmo2", "olmo3": "olmo2", "olmoe": "olmoe", "glm4": "glm4", "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2", "ministral3": "mistral3", "ernie4_5": "ernie4_5", "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_v1_dense": "hunyuan-dense", "starcoder2": "starcoder2", "stablelm": "stablelm", "cohere": "command-r",
    "cohere2": "cohere2", "exaone4": "exaone4", "muse_glimmer": "muse-glimmer", "llama4_text": "llama4",
}  # fmt: skip
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    "self_attn.o_proj": "attn_output",
    "mlp.gate": "ffn_gate_inp",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
_BEHIND = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
_OWN_PARTS = {
    **dict.fromkeys(("olmo2", "olmo3", "exaone4"), _BEHIND),
    "glm4": {
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
        "mlp.gate_up_proj": "ffn_up",
    },
    "glm4_moe": {"post_attention_layernorm": "post_attention_norm"},
    "minimax_m2": {"block_sparse_moe.gate": "ffn_gate_inp"},
    "hunyuan_v1_dense": {"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"},
    "llama4_text": {
        "feed_forward.router": "ffn_gate_inp",
        **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
        **{f"feed_forward.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    },
    "starcoder2": {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    "muse_glimmer": {**_BEHIND, "pre_feedforward_layernorm": "ffn_norm", "self_attn.gate_proj": "attn_gate"},
}
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe|feed_forward)\.experts\.(\d+)\.(\w+)")
_HEAD_NORM = re.compile(r"self_attn\.([qk])_layernorm\.norms\.(\d+)")
_EXPERT_PARTS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def write_small(folder: Path, path: Path, kind: str = "F32") -> Path:
    """Write the checkpoint in `folder` as a GGUF file with matrices of type `kind`."""
    config = json.loads((folder / "config.json").read_text())
    config = {**config, **config.get("text_config", {}), "model_type": config["model_type"]}
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config["model_type"]])
    _write_settings(writer, config)
    quant = gguf.GGMLQuantizationType[kind]
    for name, values in _tensors(folder, config).items():
        is_matrix = values.ndim > 1 and "gate_inp" not in name
        data = quantize(values, quant) if is_matrix else values
        writer.add_tensor(name, data, raw_dtype=quant if is_matrix else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_settings(writer: Any, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config.get("intermediate_size_mlp", config["intermediate_size"]))
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(config.get("layer_norm_eps") or config["norm_epsilon"])
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    theta = rope["rope_theta"] * rope.get("alpha", 1.0) ** (head_dim / (head_dim - 2))
    writer.add_rope_freq_base(theta)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    if rate := rope.get("llama_4_scaling_beta"):
        writer.add_float32("mistral3.attention.temperature_scale", rate)
    _write_own(writer, config)


def _write_own(writer: Any, config: dict[str, Any]) -> None:
    kind = config["model_type"]
    if config.get("sliding_window") and kind != "starcoder2":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([each == "sliding_attention" for each in config["layer_types"]])
    if scale := config.get("logit_scale", config.get("output_multiplier")):
        writer.add_logit_scale(scale)
    if kind == "muse_glimmer":
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    numbers = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    experts = next((config[key] for key in numbers if config.get(key)), None)
    if experts is None:
        return
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config.get("num_experts_per_tok") or config["moe_k"])
    if kind == "llama4_text":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    shared = config.get("n_shared_experts", config.get("moe_num_shared_experts"))
    if shared is not None:
        writer.add_expert_shared_count(shared)
        first = config.get("first_k_dense_replace", config.get("moe_layer_start_index"))
        writer.add_leading_dense_block_count(first)
    if kind == "glm4_moe":
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if kind == "ernie4_5_moe":
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])


def _loaded(folder: Path) -> Iterator[tuple[str, Values]]:
    """Yield the checkpoint's tensors; Llama 4's stacks of transposed matrices as experts one by one."""
    for name, tensor in load_file(folder / "model.safetensors").items():
        values, (before, _, part) = tensor.float().numpy(), name.partition(".experts.")
        if not before.endswith("feed_forward") or not part:
            yield name, values
            continue
        for number, matrix in enumerate(values):
            parts = (
                {"down": matrix.T}
                if part == "down_proj"
                else dict(zip(("gate", "up"), np.split(matrix.T, 2), strict=True))
            )
            for inner, rows in parts.items():
                yield f"{before}.experts.{number}.{inner}_proj.weight", np.ascontiguousarray(rows)


def _stack_of(part: str) -> tuple[str, int] | None:
    """Return the tensor that a part of a block belongs to, and its number there."""
    if found := _EXPERT.fullmatch(part):
        return f"ffn_{_EXPERT_PARTS[found[2]]}_exps", int(found[1])
    found = _HEAD_NORM.fullmatch(part)
    return found and (f"attn_{found[1]}_norm", int(found[2]))


def _tensors(folder: Path, config: dict[str, Any]) -> dict[str, Values]:
    kind = config["model_type"]
    parts = {**_PARTS, **_OWN_PARTS.get(kind, {})}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    written: dict[str, Values] = {}
    experts: dict[str, dict[int, Values]] = {}
    for full, values in _loaded(folder):
        name = full.replace("model.language_model.", "model.")
        stem, _, suffix = name.rpartition(".")
        if name.startswith("model.vision"):
            continue
        if stem in _OUTSIDE:
            written[f"{_OUTSIDE[stem]}.{suffix}"] = values
            continue
        layer, part = stem.removeprefix("model.layers.").split(".", 1)
        if suffix == "e_score_correction_bias":
            written[f"blk.{layer}.exp_probs_b.bias"] = values.reshape(-1)
        elif stack := _stack_of(part):
            experts.setdefault(f"blk.{layer}.{stack[0]}.weight", {})[stack[1]] = values
        else:
            renamed = parts[part]
            has_turns = kind in ("ministral3", "muse_glimmer") and renamed in heads
            stored = permuted(values, heads[renamed]) if has_turns else values
            is_stored_less_one = kind == "muse_glimmer" and part.endswith("layernorm")
            written[f"blk.{layer}.{renamed}.{suffix}"] = stored + np.float32(1) if is_stored_less_one else stored
    for name, by_number in experts.items():
        written[name] = np.stack([by_number[number] for number in sorted(by_number)])
    if kind == "muse_glimmer":
        for block in range(config["num_hidden_layers"]):
            scale = config["qk_scale_factor"]
            written[f"blk.{block}.attn_q_norm.weight"] = np.full(config["head_dim"], scale, np.float32)
            written[f"blk.{block}.attn_k_norm.weight"] = np.ones(config["head_dim"], np.float32)
    return written
