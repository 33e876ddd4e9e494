"""Qwen3 (Yang et al. 2025, arXiv:2505.09388), dense and with experts: norms over each head of queries and keys."""

from octavo.config.family import (
    DECODER_NAMES,
    HEAD_NORM_NAMES,
    Family,
    GgufFacts,
    MoEFacts,
    expert_names,
    stacked_experts,
)

_NAMES = {**DECODER_NAMES, **HEAD_NORM_NAMES}
_MLP = "model.layers.{layer}.mlp"
_EXPERT = _MLP + ".experts.{expert}"

FAMILIES = (
    Family(
        name="Qwen3ForCausalLM",
        model_type="qwen3",
        weight_names=_NAMES,
        num_kv_heads=32,
        head_dim=128,
        window_rule="upper_layers",
        head_norms="each",
        gguf=GgufFacts(architecture="qwen3", is_written=True),
        vector_sizes=(),
    ),
    Family(
        name="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        weight_names={**_NAMES, **expert_names(f"{_MLP}.gate", _EXPERT)},
        other_spellings=stacked_experts(_EXPERT),
        num_kv_heads=4,
        window_rule="all_layers_on_demand",
        head_norms="each",
        moe=MoEFacts(num_experts=128, top_k=8, intermediate_size=768),
        gguf=GgufFacts(
            architecture="qwen3moe", settings=lambda keys, so_far: {"norm_topk_prob": True}, is_written=True
        ),
    ),
)
