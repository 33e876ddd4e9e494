"""StarCoder 2 (Lozhkov et al. 2024, arXiv:2402.19173): layer norms, biases everywhere, MLPs without a gate.

GGUF files do not say whether there is a window, and llama.cpp has none.
"""

from octavo.config.family import DECODER_NAMES, Family, GgufFacts, Layers
from octavo.config.hf_layers import read_layers
from octavo.config.json_fields import JsonFields


def _read_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    has_bias = fields.flag("use_bias", True)
    fields = fields.with_key("attention_bias", has_bias).with_key("mlp_bias", has_bias)
    return read_layers(fields, family, max_position_embeddings)


FAMILIES = (
    Family(
        name="Starcoder2ForCausalLM",
        model_type="starcoder2",
        read_layers=_read_layers,
        weight_names={
            **{name: place for name, place in DECODER_NAMES.items() if ".mlp." not in name},
            "model.layers.{layer}.mlp.c_fc": "layers.{layer}.mlp.up",
            "model.layers.{layer}.mlp.c_proj": "layers.{layer}.mlp.down",
        },
        num_kv_heads=2,
        window_rule="all_layers",
        window=None,
        has_mlp_bias_key=True,
        rms_norm_eps=1e-5,
        usual_keys={"norm_epsilon": "rms_norm_eps"},
        norm_kind="centered_with_bias",
        activation="plain_gelu",
        defaults={"tie_word_embeddings": True},
        gguf=GgufFacts(
            architecture="starcoder2",
            names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
            settings=lambda keys, so_far: {"use_bias": "blk.0.attn_q.bias" in keys.tensors},
        ),
    ),
)
