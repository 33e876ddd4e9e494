"""Command R (Cohere 2024) and Command R7B, A (arXiv:2504.00698): both branches of a block read one layer norm.

Adjacent pairs are rotated; in the newer ones not where a layer sees all positions, which is every fourth. The norms of
Command R+ differ from head to head.
"""

from octavo.config.families.gemma3 import gguf_layer_types
from octavo.config.family import DECODER_NAMES, HEAD_NORM_NAMES, Family, GgufFacts, Layers
from octavo.config.hf_layers import read_layers
from octavo.config.json_fields import JsonFields


def _read_command_r(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    layers, rotary = read_layers(fields, family, max_position_embeddings)
    norms = "by_head" if fields.flag("use_qk_norm", False) else None
    return tuple(layer.with_attention(head_norms=norms) for layer in layers), rotary


def _read_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    layers, rotary = read_layers(fields, family, max_position_embeddings)
    return tuple(
        layer if layer.attention.sliding_window else layer.with_attention(rotary=None) for layer in layers
    ), rotary


FAMILIES = (
    Family(
        name="CohereForCausalLM",
        model_type="cohere",
        read_layers=_read_command_r,
        weight_names={**DECODER_NAMES, **HEAD_NORM_NAMES},
        rotates_pairs=True,
        rms_norm_eps=1e-5,
        usual_keys={"layer_norm_eps": "rms_norm_eps"},
        norm_kind="centered",
        norms="shared",
        rope_theta=5e5,
        logits_factor_key="logit_scale",
        defaults={"logit_scale": 0.0625, "tie_word_embeddings": True},
        gguf=GgufFacts(
            architecture="command-r",
            settings=lambda keys, so_far: {
                "logit_scale": keys.number("logit_scale"),
                "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.tensors,
            },
        ),
    ),
    Family(
        name="Cohere2ForCausalLM",
        model_type="cohere2",
        read_layers=_read_layers,
        weight_names=DECODER_NAMES,
        window_rule="pattern",
        rotates_pairs=True,
        rms_norm_eps=1e-5,
        usual_keys={"layer_norm_eps": "rms_norm_eps"},
        norm_kind="centered",
        norms="shared",
        logits_factor_key="logit_scale",
        defaults={"logit_scale": 0.0625, "tie_word_embeddings": True, "sliding_window_pattern": 4},
        gguf=GgufFacts(
            architecture="cohere2",
            settings=lambda keys, so_far: {
                "logit_scale": keys.number("logit_scale"),
                "layer_types": gguf_layer_types(keys, keys.integer("block_count"), 4),
            },
        ),
    ),
)
