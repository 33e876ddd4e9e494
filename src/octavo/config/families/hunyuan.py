"""Hunyuan, dense (Tencent 2025): Llama with norms over each rotated head of queries and keys.

Its "dynamic" scaling with an alpha is another base of the frequencies, whatever the length.
"""

from octavo.config.family import DECODER_NAMES, Family, GgufFacts, Layers
from octavo.config.hf_layers import read_layers, without_keys
from octavo.config.json_fields import JsonFields


def _read_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    for key in ("use_cla", "use_mla", "num_experts"):
        if fields.values.get(key) not in (None, False, 1):
            raise fields.unsupported(key)
    stated = next((each for key in ("rope_parameters", "rope_scaling") if (each := fields.nested(key)).values), None)
    if stated is not None and "alpha" in stated:
        size = fields.integer("head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads"))
        theta = stated.number("rope_theta", fields.number("rope_theta", family.rope_theta))
        theta *= stated.number("alpha") ** (size / (size - 2))
        plain = {"rope_type": "default", "rope_theta": theta}
        fields = without_keys(fields, "rope_theta").with_key("rope_scaling", None).with_key("rope_parameters", plain)
    return read_layers(without_keys(fields, "num_experts"), family, max_position_embeddings)


FAMILIES = (
    Family(
        name="HunYuanDenseV1ForCausalLM",
        model_type="hunyuan_v1_dense",
        read_layers=_read_layers,
        weight_names={
            **DECODER_NAMES,
            "model.layers.{layer}.self_attn.query_layernorm": "layers.{layer}.attention.head_norms:query",
            "model.layers.{layer}.self_attn.key_layernorm": "layers.{layer}.attention.head_norms:key",
        },
        head_norms="each_behind",
        rms_norm_eps=1e-5,
        gguf=GgufFacts(
            architecture="hunyuan-dense",
            names={"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
        ),
    ),
)
