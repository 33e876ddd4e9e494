"""LLaVA (Liu et al. 2023, arXiv:2304.08485): CLIP or SigLIP before Llama, Mistral or Qwen2, one token a patch."""

from octavo.config.family import Family
from octavo.config.hf_images import CLIP, SIGLIP, read_plain_tower, read_token
from octavo.config.json_fields import JsonFields
from octavo.config.model import ClassToken, VisionConfig
from octavo.errors import UnsupportedModelError

_CLIP_ALONE = {  # absent keys, if there is no vision_config at all
    "model_type": CLIP,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}


def _read_tower(fields: JsonFields, out_hidden_size: int) -> VisionConfig:
    """Its features are those of one of its last layers or several."""
    vision = fields.nested("vision_config")
    if not vision.values:
        vision = JsonFields(vision.origin, _CLIP_ALONE)
    kind = vision.text("model_type", CLIP)
    if kind not in (CLIP, SIGLIP):
        raise vision.unsupported("model_type", f"; known: {CLIP}, {SIGLIP}")
    strategy = fields.text("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise fields.fail("vision_feature_select_strategy", "default or full is expected")
    if kind == SIGLIP and strategy == "default":
        why = "drops the first patch of a tower without class token; only 'full' is supported"
        raise UnsupportedModelError(f"{fields.origin}: vision_feature_select_strategy={strategy!r} {why}")
    if fields.text("projector_hidden_act", "gelu") != "gelu":
        raise fields.unsupported("projector_hidden_act", "; known: gelu")
    by_strategy: ClassToken = "internal" if strategy == "default" else "output"
    num_layers = vision.integer("num_hidden_layers", 12)
    stated = fields.values.get("vision_feature_layer", -2)  # counted from either end; 0: before all
    layers = stated if isinstance(stated, list) else [stated]
    if not layers or not all(type(each) is int and -num_layers - 1 <= each <= num_layers for each in layers):
        raise fields.fail("vision_feature_layer", f"numbers from {-num_layers - 1} to {num_layers} are expected")
    return VisionConfig(
        spatial_merge_size=1,
        class_token=by_strategy if kind == CLIP else "none",
        feature_depths=tuple(each if each >= 0 else num_layers + 1 + each for each in layers),
        projector_has_bias=fields.flag("multimodal_projector_bias", True),
        image_token_id=read_token(fields, "image_token", 32000),
        **read_plain_tower(vision, out_hidden_size),
    )


_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_MISTRAL = {**_LLAMA, "intermediate_size": 14336, "max_position_embeddings": 131072}
_QWEN2 = {**_LLAMA, "vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}

FAMILIES = (
    Family(
        name="LlavaForConditionalGeneration",
        model_type="llava",
        model="octavo.models.llava:LlavaForConditionalGeneration",
        text=("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"),
        defaults={"llama": _LLAMA, "mistral": _MISTRAL, "qwen2": _QWEN2},
        read_tower=_read_tower,
    ),
)
