"""Writes GGUF files of models with latent attention, in both of their forms, under ggml's names."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from safetensors.torch import load_file

_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    **{part: f"nextn.{part}" for part in ("eh_proj", "enorm", "hnorm")},
    "shared_head.norm": "nextn.shared_head_norm",
}
_CORRECTION = "mlp.gate.e_score_correction_bias"


def write_deepseek2(
    folder: Path,
    path: Path,
    *,
    is_new: bool,
    kind: str = "F32",
    has_next: bool = False,
    says_gating: bool = True,
    has_weights: bool = True,
) -> Path:
    """Write the checkpoint in `folder`; the new form has keys and values of heads apart, the old one together."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "deepseek2")
    _write_settings(writer, config, is_new=is_new, has_next=has_next, says_gating=says_gating)
    quant = gguf.GGMLQuantizationType[kind]
    tensors = _tensors(folder, config, is_new=is_new) if has_weights else []
    for name, values in tensors:
        is_matrix = values.ndim > 1 and "gate_inp" not in name
        data = quantize(values, quant) if is_matrix else values
        writer.add_tensor(name, data, raw_dtype=quant if is_matrix else None)
    if not has_weights:
        writer.add_tensor("token_embd.weight", np.zeros((config["vocab_size"], 1), np.float32))
    if has_next and not any(".nextn." in name for name, _ in tensors):
        for part in ("nextn.eh_proj", "nextn.enorm", "attn_kv_b", "nextn.shared_head_norm"):
            writer.add_tensor(f"blk.{config['num_hidden_layers']}.{part}.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_settings(writer: Any, config: dict[str, Any], *, is_new: bool, has_next: bool, says_gating: bool) -> None:
    is_sigmoid = config["model_type"] != "deepseek_v2"
    rank, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    key, value = config["qk_nope_head_dim"] + rotary, config["v_head_dim"]
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"] + has_next)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(1 if is_new else config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(rotary)
    writer.add_key_length(rank + rotary if is_new else key)
    writer.add_value_length(rank if is_new else value)
    writer.add_kv_lora_rank(rank)
    if is_new:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    if has_next:
        writer.add_nextn_predict_layers(1)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config["routed_scaling_factor"] != 1.0:
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    if says_gating:
        kinds = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(kinds.SIGMOID if is_sigmoid else kinds.SOFTMAX)
    if config.get("n_group"):
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _tensors(folder: Path, config: dict[str, Any], *, is_new: bool) -> list[tuple[str, Any]]:
    found = {name: tensor.numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
    result: list[tuple[str, Any]] = []
    stacks: dict[str, dict[int, Any]] = {}
    for name, values in found.items():
        layer_name = name.removesuffix(".weight")
        if layer_name in _OUTSIDE:
            result.append((f"{_OUTSIDE[layer_name]}.weight", values))
            continue
        _, _, number, part = layer_name.split(".", 3)
        block = f"blk.{number}"
        if part.startswith("mlp.experts."):
            _, _, expert, kind = part.split(".")
            stacks.setdefault(f"{block}.ffn_{kind.removesuffix('_proj')}_exps.weight", {})[int(expert)] = values
        elif part == _CORRECTION:
            result.append((f"{block}.exp_probs_b.bias", values))
        elif part == "self_attn.kv_b_proj" and is_new:
            heads, key = config["num_attention_heads"], config["qk_nope_head_dim"]
            of_heads = values.reshape(heads, key + config["v_head_dim"], -1)
            result.append((f"{block}.attn_k_b.weight", np.ascontiguousarray(of_heads[:, :key].transpose(0, 2, 1))))
            result.append((f"{block}.attn_v_b.weight", np.ascontiguousarray(of_heads[:, key:])))
        else:
            result.append((f"{block}.{_PARTS[part]}.weight", values))
    for name, experts in stacks.items():
        result.append((name, np.stack([experts[number] for number in range(len(experts))])))
    return result
