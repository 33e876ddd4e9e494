"""StableLM (Stability AI 2023, arXiv:2402.17834): Llama with layer norms, whose heads are rotated in part."""

from octavo.config.family import DECODER_NAMES, HEAD_NORM_NAMES, Family, GgufFacts, Layers
from octavo.config.hf_layers import read_layers
from octavo.config.json_fields import JsonFields


def _read_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    fields = fields.with_key("attention_bias", fields.flag("use_qkv_bias", False))
    layers, rotary = read_layers(fields, family, max_position_embeddings)
    norms = "by_head" if fields.flag("qk_layernorm", False) else None
    return tuple(layer.with_attention(head_norms=norms) for layer in layers), rotary


FAMILIES = (
    Family(
        name="StableLmForCausalLM",
        model_type="stablelm",
        model="octavo.models.stablelm:StableLmForCausalLM",
        read_layers=_read_layers,
        weight_names={**DECODER_NAMES, **HEAD_NORM_NAMES},
        has_out_bias=False,
        rms_norm_eps=1e-5,
        usual_keys={"layer_norm_eps": "rms_norm_eps"},
        norm_kind="centered_with_bias",
        parallel_key="use_parallel_residual",
        has_partial_rotary=True,
        defaults={"partial_rotary_factor": 0.25},
        gguf=GgufFacts(
            architecture="stablelm",
            settings=lambda keys, so_far: {
                "use_qkv_bias": "blk.0.attn_q.bias" in keys.tensors,
                "qk_layernorm": "blk.0.attn_q_norm.weight" in keys.tensors,
                "use_parallel_residual": "blk.0.ffn_norm.weight" not in keys.tensors,
            },
        ),
    ),
)
