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

MAX_LEN = 256
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_FIRST_SPECIAL = 256
IMAGE, VIDEO, START, END = (
    _FIRST_SPECIAL + SPECIAL.index(f"<|{name}|>") for name in ("image_pad", "video_pad", "vision_start", "vision_end")
)
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO_PLACE = PLACE.replace("image", "video")
PATCH = 4
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
_PROCESSOR = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyVisionModel:
    """A family of transformers, and its settings."""

    family: str
    vision: dict[str, Any]
    text: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    tie_word_embeddings: bool = False

    def save(self, folder: Path, seed: int = 0) -> Any:
        """Save a checkpoint to `folder` and return transformers' model of it, in float32 with random weights."""
        config = getattr(transformers, self.family + "Config")(
            text_config={**_TEXT, **self.text},
            vision_config={**_VISION, **self.vision},
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=START,
            vision_end_token_id=END,
            tie_word_embeddings=self.tie_word_embeddings,
        )
        model = getattr(transformers, self.family + "ForConditionalGeneration")(config).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                is_norm = name.endswith("weight") and ("norm" in name or "ln_q" in name)
                parameter.copy_(1.0 + 0.3 * noise if is_norm else 0.2 * noise)
        model.generation_config.eos_token_id = None
        model.save_pretrained(folder)
        settings = {**_PROCESSOR, "size": {"shortest_edge": 64, "longest_edge": 40 * 64}, **self.processor}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
        _save_tokenizer(folder)
        return model


VISION_MODELS = {
    "qwen2-vl": TinyVisionModel(family="Qwen2VL", vision={"embed_dim": 32, "hidden_size": 36, "mlp_ratio": 2}),
    "qwen2.5-vl": TinyVisionModel(
        family="Qwen2_5_VL",
        vision={
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
        processor={"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
    ),
}


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return a picture that no other seed has."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def _save_tokenizer(folder: Path) -> None:
    """Save a tokenizer of bytes, whose ids are below those of the special tokens."""
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    assert tokenizer.token_to_id("<|image_pad|>") == IMAGE
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
