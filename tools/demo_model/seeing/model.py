"""The model: transformers' Qwen2.5-VL in a small size, and how it is run on rows whose pictures have one grid."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tools.demo_model.bpe import save_tokenizer, token_id
from tools.demo_model.seeing.batches import IMAGE_START, Batch
from tools.demo_model.seeing.conversations import SPECIAL, end_tokens
from tools.demo_model.seeing.scenes import PLACES
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from octavo.config.families import FAMILIES
from octavo.config.json_fields import JsonFields
from octavo.multimodal.image_processors import NativeSizeProcessor

MAX_LENGTH = 2048
PATCH, MERGE = 14, 2
# A picture of any size whose sides differ by less than a third becomes 84 x 84 pixels: 9 tokens, one for each place.
MIN_PIXELS, MAX_PIXELS = 4800, 9400
MEAN = (0.5, 0.5, 0.5)
TEMPLATE_PATH = Path(__file__).with_name("chat_template.jinja")


def model_config(tokenizer: Tokenizer) -> Qwen2_5_VLConfig:
    """Return the model's shape."""
    end_of_turn, end_of_text = end_tokens(tokenizer)
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": MAX_LENGTH,
            "bos_token_id": None,
            "eos_token_id": end_of_turn,
            "pad_token_id": end_of_text,
            # From 1 to 0.0015 radians a token: one frequency is for time, two for rows, the others for columns. So
            # rows and columns have some that tell neighbors apart, and text has slow ones, by which a question finds
            # what it names, however far away the picture is.
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [1, 2, 13]},
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 3,
            "hidden_size": 128,
            "out_hidden_size": 128,
            "intermediate_size": 320,
            "num_heads": 4,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "window_size": 2 * PATCH * MERGE,
            "fullatt_block_indexes": [0, 1, 2],
        },
        image_token_id=token_id(tokenizer, "<|image_pad|>"),
        video_token_id=token_id(tokenizer, "<|video_pad|>"),
        vision_start_token_id=token_id(tokenizer, "<|vision_start|>"),
        vision_end_token_id=token_id(tokenizer, "<|vision_end|>"),
        tie_word_embeddings=True,
    )


def processor_settings() -> dict[str, object]:
    """Return `preprocessor_config.json`."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        "image_mean": MEAN,
        "image_std": MEAN,
    }


def image_processor(tokenizer: Tokenizer) -> NativeSizeProcessor:
    """Return what the engine makes of these settings."""
    fields = JsonFields("config", model_config(tokenizer).to_dict())
    read_tower = FAMILIES["Qwen2_5_VLForConditionalGeneration"].read_tower
    assert read_tower is not None, "the family takes images"
    vision = read_tower(fields, fields.nested("text_config").integer("hidden_size"))
    return NativeSizeProcessor.of(JsonFields("processor", processor_settings()), vision)


def generation_defaults(tokenizer: Tokenizer) -> dict[str, object]:
    """Return `generation_config.json`: answers are exact, so the likeliest token."""
    end_of_turn, end_of_text = end_tokens(tokenizer)
    return {"eos_token_id": [end_of_turn, end_of_text], "pad_token_id": end_of_text, "do_sample": True, "top_k": 1}


class Seeing(torch.nn.Module):
    """The model, and linears that read from each picture token what it shows and where, which only training uses."""

    def __init__(self, tokenizer: Tokenizer, num_kinds: int, num_colours: int) -> None:
        super().__init__()
        self.network: Any = Qwen2_5_VLForConditionalGeneration._from_config(
            model_config(tokenizer), attn_implementation="sdpa"
        )
        self.sizes = (num_kinds, num_colours)
        width = self.network.config.text_config.hidden_size
        self.reader = torch.nn.Linear(width, num_kinds + num_colours)
        self.place_reader = torch.nn.Linear(width, len(PLACES))

    def load(self, checkpoint: Path) -> None:
        """Take the weights of a checkpoint; it has none of the linears."""
        known = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
        self.network.load_state_dict(known.state_dict())

    def forward(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """Return logits of the tokens with loss [N, V], and what was read: kinds, colours and places [B * M, classes].

        The tower's tokens show what they see. Where they are, the first layer of the decoder learns from their distance
        to the token before them: attention by relative positions cannot tell the patches of a blank ground apart.
        """
        inner = self.network.model
        embeddings = inner.language_model.embed_tokens(batch.ids)
        read: list[Tensor] = []
        if batch.patches is not None:
            grids = torch.tensor([batch.grid] * len(batch.ids))
            tokens = inner.visual(batch.patches, grids).pooler_output  # [B * M, D]
            read = list(self.reader(tokens).split(self.sizes, dim=-1))
            tokens = tokens.view(len(batch.ids), -1, tokens.shape[-1])
            start, end = IMAGE_START + 1, IMAGE_START + 1 + tokens.shape[1]
            embeddings = torch.cat([embeddings[:, :start], tokens, embeddings[:, end:]], dim=1)
        mask = None if batch.sees is None else {"full_attention": batch.sees}
        first: list[Tensor] = []
        hook = inner.language_model.layers[0].register_forward_hook(lambda _, __, output: first.append(output))
        hidden = inner.language_model(
            inputs_embeds=embeddings, attention_mask=mask, position_ids=batch.positions, use_cache=False
        )
        hook.remove()
        if batch.patches is not None:
            read.append(self.place_reader(first[0][:, start:end].flatten(0, 1)))
        return self.network.lm_head(hidden.last_hidden_state[batch.answers > 0]), read


def save(model: Seeing, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the checkpoint: weights in bfloat16, configuration, tokenizer, template, settings of the processor."""
    network = model.network
    weights = {name: value.clone() for name, value in network.state_dict().items()}
    network.to(torch.bfloat16).save_pretrained(folder)
    network.float().load_state_dict(weights)
    (folder / "model.safetensors").chmod(0o644)
    save_tokenizer(tokenizer, folder, SPECIAL, TEMPLATE_PATH)
    _write(folder / "preprocessor_config.json", processor_settings())
    _write(folder / "generation_config.json", generation_defaults(tokenizer))


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
