"""MiniMax M2 (MiniMax 2025): norms over all heads, experts chosen by corrected sigmoids, half of each head rotated."""

from dataclasses import replace

from msgspec import structs

from octavo.config.family import (
    DECODER_NAMES,
    HEAD_NORM_NAMES,
    Family,
    GgufFacts,
    Layers,
    MoEFacts,
    expert_names,
    stacked_experts,
)
from octavo.config.hf_layers import read_layers
from octavo.config.json_fields import JsonFields
from octavo.config.layers import ExpertsSpec, RoutingSpec

_ROUTING = RoutingSpec(scores="sigmoid", has_correction=True, gates_shared=False)


def _read_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    if fields.values.get("shared_intermediate_size"):
        raise fields.unsupported("shared_intermediate_size")
    if "rotary_dim" in fields:  # what published files have
        fraction = fields.integer("rotary_dim") / fields.integer("head_dim", family.head_dim)
        fields = fields.with_key("partial_rotary_factor", fraction)
    layers, rotary = read_layers(fields, family, max_position_embeddings)
    experts = layers[0].feed_forward
    assert isinstance(experts, ExpertsSpec), "all layers have experts"
    experts = structs.replace(experts, routing=_ROUTING)
    return tuple(replace(layer, feed_forward=experts) for layer in layers), rotary


_MOE = "model.layers.{layer}.block_sparse_moe"
_EXPERT, _MLP = _MOE + ".experts.{expert}", "model.layers.{layer}.mlp"
_CORRECTION = f"{_MOE}.gate.e_score_correction_bias"

FAMILIES = (
    Family(
        name="MiniMaxM2ForCausalLM",
        model_type="minimax_m2",
        read_layers=_read_layers,
        weight_names={**DECODER_NAMES, **HEAD_NORM_NAMES, **expert_names(f"{_MOE}.gate", _EXPERT, "w1", "w3", "w2")},
        other_spellings={
            f"{_MOE}.e_score_correction_bias": (_CORRECTION,),
            f"{_MLP}.e_score_correction_bias": (_CORRECTION,),
            f"{_MLP}.gate.weight": (f"{_MOE}.gate.weight",),
            **stacked_experts(_EXPERT, "w1", "w3", "w2"),
        },
        leaves_out_further_layers=True,
        num_kv_heads=8,
        head_dim=128,
        qkv_bias=False,
        head_norms="whole",
        rope_theta=5e6,
        has_partial_rotary=True,
        moe=MoEFacts(num_experts=256, top_k=8, always_renormalizes=True, has_dense_layers=False),
        gguf=GgufFacts(
            architecture="minimax-m2",
            names={
                "ffn_gate_inp": "block_sparse_moe.gate",
                "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias",
                "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
                "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
                "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
            },
        ),
    ),
)
