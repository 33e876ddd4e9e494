"""Phi-1 to Phi-2 (Microsoft 2023, arXiv:2306.11644): both branches of a block read one layer norm; all have biases."""

from octavo.config.family import DECODER_NAMES, Family, Layers
from octavo.config.hf_layers import read_layers
from octavo.config.json_fields import JsonFields


def _read_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    if fields.values.get("tie_word_embeddings"):
        raise fields.unsupported("tie_word_embeddings", ": logits have biases")
    if fields.values.get("qk_layernorm"):
        raise fields.unsupported("qk_layernorm")
    fields = fields.with_key("attention_bias", True).with_key("mlp_bias", True)
    return read_layers(fields, family, max_position_embeddings)


_OTHERS = (".mlp.", "norm", "o_proj")  # what has other names here

FAMILIES = (
    Family(
        name="PhiForCausalLM",
        model_type="phi",
        read_layers=_read_layers,
        weight_names={
            **{name: place for name, place in DECODER_NAMES.items() if not any(part in name for part in _OTHERS)},
            "model.layers.{layer}.self_attn.dense": "layers.{layer}.attention.out",
            "model.layers.{layer}.input_layernorm": "layers.{layer}.attention_norm",
            "model.layers.{layer}.mlp.fc1": "layers.{layer}.mlp.up",
            "model.layers.{layer}.mlp.fc2": "layers.{layer}.mlp.down",
            "model.final_layernorm": "norm",
        },
        has_mlp_bias_key=True,
        has_head_bias=True,
        rms_norm_eps=1e-5,
        usual_keys={"layer_norm_eps": "rms_norm_eps"},
        norm_kind="centered_with_bias",
        norms="shared",
        activation="plain_gelu",
        has_partial_rotary=True,
        defaults={"partial_rotary_factor": 0.5},
    ),
)
