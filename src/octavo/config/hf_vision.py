"""Reads models with a vision tower from `config.json`: the tower and the language model."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from octavo.config.architectures import ARCHITECTURES, ArchitectureFacts
from octavo.config.hf_vision_plain import read_gemma3_vision, read_llava_vision
from octavo.config.hf_vision_qwen import read_qwen_vision
from octavo.config.json_fields import JsonFields
from octavo.config.vision import VisionConfig, VisionFamily
from octavo.errors import UnsupportedModelError

_READERS: MappingProxyType[VisionFamily, Callable[[JsonFields, int], VisionConfig]] = MappingProxyType(
    {
        "qwen2_vl": partial(read_qwen_vision, family="qwen2_vl"),
        "qwen2_5_vl": partial(read_qwen_vision, family="qwen2_5_vl"),
        "qwen3_vl": partial(read_qwen_vision, family="qwen3_vl"),
        "gemma3": read_gemma3_vision,
        "llava": read_llava_vision,
    }
)


def text_fields(fields: JsonFields, facts: ArchitectureFacts) -> JsonFields:
    """Return the language model's keys: under `text_config`, or in older files next to the others."""
    text = fields.nested("text_config")
    values: dict[str, Any] = {
        **fields.values,
        **dict.fromkeys(fields.nulls),
        **text.values,
        **dict.fromkeys(text.nulls),
    }
    # Files have it in either place; but where true is the default, `text_config` repeats it unasked.
    is_default = facts.defaults.get("tie_word_embeddings", False)
    ties = (fields,) if is_default else (fields, text)
    values["tie_word_embeddings"] = any(of.flag("tie_word_embeddings", is_default) for of in ties)
    return JsonFields(fields.origin, values)


def text_facts(fields: JsonFields, facts: ArchitectureFacts) -> ArchitectureFacts:
    """Return the facts about the language model: the model's own, or those of the kind that `text_config` names.

    Raises:
        UnsupportedModelError: a kind that the model does not support.
    """
    if not facts.text:
        return facts
    known = {ARCHITECTURES[name].model_type: name for name in facts.text}
    kind = fields.nested("text_config").text("model_type", next(iter(known)))
    if kind not in known:
        raise UnsupportedModelError(
            f"{fields.origin}: text_config: model_type={kind!r} is not supported; known: {', '.join(known)}"
        )
    return replace(ARCHITECTURES[known[kind]], defaults=facts.defaults.get(kind, {}), vision=facts.vision)


def read_vision(fields: JsonFields, family: VisionFamily, out_hidden_size: int) -> VisionConfig:
    """Read `vision_config` of a model whose language model has `out_hidden_size`.

    Raises:
        CheckpointError: a missing or malformed value.
        UnsupportedModelError: a setting that would change the result.
    """
    return _READERS[family](fields, out_hidden_size)
