"""SmolLM3 (Hugging Face 2025): Llama whose every fourth layer does not rotate (arXiv:2501.18795)."""

from octavo.config.family import Family, GgufFacts, Layers
from octavo.config.hf_layers import read_layers
from octavo.config.json_fields import JsonFields


def _read_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    layers, rotary = read_layers(fields, family, max_position_embeddings)
    every = fields.integer("no_rope_layer_interval", 4)
    rotates = fields.integers("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(len(layers))]
    if len(rotates) != len(layers):
        raise fields.fail("no_rope_layers", f"{len(layers)} entries are expected")
    turned = zip(rotates, layers, strict=True)
    return tuple(layer if turns else layer.with_attention(rotary=None) for turns, layer in turned), rotary


FAMILIES = (
    Family(
        name="SmolLM3ForCausalLM",
        model_type="smollm3",
        read_layers=_read_layers,
        num_kv_heads=4,
        window_rule="upper_layers",
        rope_theta=2e6,
        has_mlp_bias_key=True,
        defaults={"tie_word_embeddings": True},
        gguf=GgufFacts(architecture="smollm3", interleaves_rows=True),
    ),
)
