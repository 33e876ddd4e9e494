"""Mistral (Jiang et al. 2023, arXiv:2310.06825), one window for all layers or none; Mixtral (arXiv:2401.04088).

Mistral Small 3.1 and later have Pixtral for images before it, which is left out.

GGUF files have both under Llama's name.
"""

from octavo.config.family import DECODER_NAMES, Family, GgufFacts, MoEFacts, expert_names, stacked_experts

_MOE = "model.layers.{layer}.block_sparse_moe"
_EXPERT = _MOE + ".experts.{expert}"

FAMILIES = (
    Family(
        name="MistralForCausalLM",
        model_type="mistral",
        num_kv_heads=8,
        window_rule="all_layers",
        qkv_bias=False,
        gguf=GgufFacts(
            architecture="llama",
            fits=lambda keys: bool(keys.values.get("attention.sliding_window")) and not keys.values.get("expert_count"),
            interleaves_rows=True,
            is_written=True,
        ),
    ),
    Family(
        name="Mistral3ForConditionalGeneration",
        model_type="mistral3",
        is_nested=True,
        text=("MistralForCausalLM",),
        left_out=("vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector."),
    ),
    Family(
        name="MixtralForCausalLM",
        model_type="mixtral",
        weight_names={**DECODER_NAMES, **expert_names(f"{_MOE}.gate", _EXPERT, "w1", "w3", "w2")},
        other_spellings={
            "model.layers.{layer}.mlp.gate.weight": (f"{_MOE}.gate.weight",),
            **stacked_experts(_EXPERT, "w1", "w3", "w2"),
        },
        num_kv_heads=8,
        window_rule="all_layers",
        window=None,
        qkv_bias=False,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        moe=MoEFacts(num_experts=8, top_k=2, always_renormalizes=True, has_dense_layers=False),
        gguf=GgufFacts(
            architecture="llama",
            fits=lambda keys: bool(keys.values.get("expert_count")),
            names={
                "ffn_gate_inp": "block_sparse_moe.gate",
                "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
                "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
                "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
            },
            interleaves_rows=True,
            is_written=True,
        ),
    ),
)
