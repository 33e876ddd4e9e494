"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv:2407.10671), dense and with experts: biases on queries, keys and values.

The mixture has a shared expert with a gate of its own.
"""

from octavo.config.family import DECODER_NAMES, Family, GgufFacts, MoEFacts, expert_names, stacked_experts

_MLP, _PLACE = "model.layers.{layer}.mlp", "layers.{layer}.mlp"
_EXPERT = _MLP + ".experts.{expert}"

FAMILIES = (
    Family(
        name="Qwen2ForCausalLM",
        model_type="qwen2",
        num_kv_heads=32,
        window_rule="upper_layers",
        qkv_bias=True,
        gguf=GgufFacts(architecture="qwen2", is_written=True),
    ),
    Family(
        name="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        weight_names={
            **DECODER_NAMES,
            **expert_names(f"{_MLP}.gate", _EXPERT),
            f"{_MLP}.shared_expert_gate": f"{_PLACE}.router:shared",
            f"{_MLP}.shared_expert.gate_proj": f"{_PLACE}.shared_expert.gate_up:gate",
            f"{_MLP}.shared_expert.up_proj": f"{_PLACE}.shared_expert.gate_up:up",
            f"{_MLP}.shared_expert.down_proj": f"{_PLACE}.shared_expert.down",
        },
        other_spellings=stacked_experts(_EXPERT),
        num_kv_heads=16,
        window_rule="even_lower_layers",
        has_qkv_bias_key=True,
        moe=MoEFacts(num_experts=60, top_k=4, intermediate_size=1408, shared_intermediate_size=5632),
        gguf=GgufFacts(
            architecture="qwen2moe", settings=lambda keys, so_far: {"norm_topk_prob": False}, is_written=True
        ),
    ),
)
