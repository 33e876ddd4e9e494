"""Tiny models that see: transformers builds and saves them, with a byte tokenizer, a template, processor settings."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

MAX_LEN = 256
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_FIRST_SPECIAL = 256
IMAGE, VIDEO, START, END = (
    _FIRST_SPECIAL + SPECIAL.index(f"<|{name}|>") for name in ("image_pad", "video_pad", "vision_start", "vision_end")
)
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO_PLACE = PLACE.replace("image", "video")
PATCH = 4
_WRITTEN = "<|vision_start|><|{{ part.type }}_pad|><|vision_end|>"  # by the template
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_TEXT = {
    "vocab_size": 270,
    "hidden_size": 36,
    "intermediate_size": 45,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": None,
    "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]},
}
_VISION = {"depth": 3, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2}
_PROCESSOR = {
    "patch_size": PATCH,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 40 * 64},
}
_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
_PLAIN_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 45,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": PATCH,
}
_PLAIN_ROTATION = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyVisionModel:
    """A family of transformers, and its settings."""

    family: str
    vision: dict[str, Any]
    text: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=lambda: dict(_PROCESSOR))
    tie_word_embeddings: bool = False
    tokens: dict[str, int] = field(default_factory=lambda: dict(_TOKENS))  # of placeholders and marks
    whole: dict[str, Any] = field(default_factory=dict)  # settings beside those of text and vision
    place: str = PLACE  # of an image, in prompts
    images: Any = Qwen2VLImageProcessorPil  # transformers' processor
    token_kinds: str | None = "mm_token_type_ids"  # the input that says which tokens are of images

    def with_place(self, prompt: str) -> str:
        """Return a prompt as this family has images in it, of one with `PLACE`."""
        return prompt.replace(PLACE, self.place)

    def seen(self, folder: Path, ids: torch.Tensor, images: list[Image.Image]) -> dict[str, Any]:
        """Return what transformers' model takes beside token ids [1, T], by its own image processor."""
        if not images:
            return {}
        made: dict[str, Any] = dict(self.images.from_pretrained(folder)(images, return_tensors="pt"))
        made.pop("num_crops", None)
        return {**made, self.token_kinds: (ids == IMAGE).int()} if self.token_kinds else made

    def save(self, folder: Path, seed: int = 0) -> Any:
        """Save a checkpoint to `folder` and return transformers' model of it, in float32 with random weights."""
        config = getattr(transformers, self.family + "Config")(
            text_config={**_TEXT, **self.text},
            vision_config=self.vision,
            tie_word_embeddings=self.tie_word_embeddings,
            **self.tokens,
            **self.whole,
        )
        model = getattr(transformers, self.family + "ForConditionalGeneration")(config).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                is_norm = name.endswith("weight") and ("norm" in name or "ln_q" in name or "layrnorm" in name)
                adds_one = is_norm and self.family == "Gemma3" and "vision_tower" not in name
                parameter.copy_((not adds_one) + 0.3 * noise if is_norm else 0.2 * noise)
        model.generation_config.eos_token_id = None
        model.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(self.processor))
        _save_tokenizer(folder, self.place)
        return model


VISION_MODELS = {
    "qwen2-vl": TinyVisionModel(
        family="Qwen2VL", vision={**_VISION, "embed_dim": 32, "hidden_size": 36, "mlp_ratio": 2}
    ),
    "qwen2.5-vl": TinyVisionModel(
        family="Qwen2_5_VL",
        vision={
            **_VISION,
            "hidden_size": 32,
            "out_hidden_size": 36,
            "intermediate_size": 45,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        tie_word_embeddings=True,
    ),
    "qwen3-vl": TinyVisionModel(
        family="Qwen3VL",
        vision={
            **_VISION,
            "hidden_size": 32,
            "out_hidden_size": 36,
            "intermediate_size": 45,
            "num_position_embeddings": 49,
            "deepstack_visual_indexes": [0, 2],
        },
        text={
            "head_dim": 10,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 2, 1],
                "mrope_interleaved": True,
            },
        },
        processor={**_PROCESSOR, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
    ),
    "llava": TinyVisionModel(
        family="Llava",
        vision={**_PLAIN_TOWER, "model_type": "clip_vision_model", "image_size": 20},
        text={**_PLAIN_ROTATION, "model_type": "llama"},
        processor={
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 23},
            "crop_size": {"height": 20, "width": 20},
        },
        tokens={"image_token_index": IMAGE},
        place="<|image_pad|>",
        images=CLIPImageProcessorPil,
        token_kinds=None,
    ),
    "llava-two-layers": TinyVisionModel(
        family="Llava",
        vision={**_PLAIN_TOWER, "model_type": "clip_vision_model", "image_size": 16},
        text={**_PLAIN_ROTATION, "model_type": "qwen2"},
        processor={"image_processor_type": "CLIPImageProcessorFast", "size": 16, "crop_size": 16},
        tokens={"image_token_index": IMAGE},
        whole={
            "vision_feature_layer": [1, -1],
            "vision_feature_select_strategy": "full",
            "multimodal_projector_bias": False,
        },
        place="<|image_pad|>",
        images=CLIPImageProcessorPil,
        token_kinds=None,
    ),
    "llava-siglip": TinyVisionModel(
        family="Llava",
        vision={**_PLAIN_TOWER, "model_type": "siglip_vision_model", "image_size": 22},  # not whole patches
        text={**_PLAIN_ROTATION, "model_type": "qwen2", "tie_word_embeddings": True},
        processor={"image_processor_type": "SiglipImageProcessor", "size": {"height": 22, "width": 22}},
        tokens={"image_token_index": IMAGE},
        whole={"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        place="<|image_pad|>",
        images=SiglipImageProcessorPil,
        token_kinds=None,
    ),
    "gemma3": TinyVisionModel(
        family="Gemma3",
        vision={**_PLAIN_TOWER, "image_size": 24},
        text={
            "head_dim": 10,
            "sliding_window": 9,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        processor={"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 24, "width": 24}},
        tokens={"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END},
        whole={"mm_tokens_per_image": 9},
        place="<|vision_start|>",
        images=Gemma3ImageProcessorPil,
        token_kinds="token_type_ids",
    ),
}


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return a picture that no other seed has."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def _save_tokenizer(folder: Path, place: str) -> None:
    """Save a tokenizer of bytes, whose ids are below those of the special tokens."""
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    assert tokenizer.token_to_id("<|image_pad|>") == IMAGE
    tokenizer.save(str(folder / "tokenizer.json"))
    template = TEMPLATE if place == PLACE else TEMPLATE.replace(_WRITTEN, place)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
