"""EAGLE-3 heads: what their `config.json` says.

It has several spellings: that of the original repository, SpecForge's and SGLang's with an `eagle_config`, and that of
vLLM's speculators, with the layer's keys under `transformer_layer_config`.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo.config.hf import model_config_of
from octavo.config.json_fields import JsonFields
from octavo.config.model import ModelConfig
from octavo.errors import InvalidParameterError, UnsupportedModelError

_OPTION = "speculative_config"
_HEADS = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
_AUX_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleConfig:
    """What an EAGLE-3 head reads of the model, and drafts."""

    aux_layers: tuple[int, ...]  # of the model, ascending: those whose inputs it reads
    target_hidden_size: int  # of each
    draft_vocab_size: int  # tokens that it drafts
    norm_before_residual: bool = False  # its residual stream begins with the normalized hidden state


def read_eagle(name: str, path: Path, model: ModelConfig) -> tuple[ModelConfig, EagleConfig]:
    """Return the head in a folder, called `name`, as a model of one layer, and what it reads of `model`.

    Raises CheckpointError, UnsupportedModelError: about its configuration. InvalidParameterError: it does not fit.
    """
    settings = _head_fields(name, path)
    head = replace(model_config_of(settings, path, model=name, dtype=model.dtype), tie_word_embeddings=False)
    return head, _eagle_config(settings, head, model)


def _head_fields(name: str, path: Path) -> JsonFields:
    """Return the keys of a head's `config.json`, as of a Llama of one layer."""
    if path.is_file():
        raise UnsupportedModelError(f"{_OPTION}: {name}: EAGLE-3 heads are read from folders, not GGUF files")
    found = JsonFields.read(path / "config.json")
    names = found.texts("architectures")
    if not any(each in _HEADS or each.startswith("Eagle3") or each.endswith("ForCausalLMEagle3") for each in names):
        known = ", ".join(_HEADS)
        raise UnsupportedModelError(f"{found.origin}: architectures={names}: not an EAGLE-3 head, such as {known}")
    layer = found.nested("transformer_layer_config")
    values: dict[str, Any] = {**found.values, **layer.values, "architectures": ["LlamaForCausalLM"]}
    if layer.values:
        values.setdefault("norm_before_residual", True)
    head = JsonFields(found.origin, values).with_defaults({"num_hidden_layers": 1})
    if (num_layers := head.integer("num_hidden_layers")) != 1:
        raise UnsupportedModelError(f"{head.origin}: num_hidden_layers={num_layers}: heads of one layer are supported")
    return head


def _eagle_config(settings: JsonFields, head: ModelConfig, model: ModelConfig) -> EagleConfig:
    if not settings.nested("eagle_config").flag("use_aux_hidden_state", True):
        raise UnsupportedModelError(f"{settings.origin}: eagle_config: use_aux_hidden_state=False is not supported")
    hidden_key = "target_hidden_size" if "target_hidden_size" in settings else "hidden_size"
    target_hidden_size = settings.integer(hidden_key)
    for key, size, wanted in (
        (hidden_key, target_hidden_size, model.hidden_size),
        ("vocab_size", head.vocab_size, model.vocab_size),
    ):
        if size != wanted:
            limit = f"its {key} is {size}, but {model.model} has {wanted}"
            raise InvalidParameterError(_OPTION, {"model": head.model}, limit)
    draft_vocab_size = settings.integer("draft_vocab_size", head.vocab_size)
    if draft_vocab_size > head.vocab_size:
        raise settings.fail("draft_vocab_size", f"at most vocab_size ({head.vocab_size}) is expected")
    return EagleConfig(
        aux_layers=_aux_layers(settings, model),
        target_hidden_size=target_hidden_size,
        draft_vocab_size=draft_vocab_size,
        norm_before_residual=settings.flag("norm_before_residual", False),
    )


def _aux_layers(settings: JsonFields, model: ModelConfig) -> tuple[int, ...]:
    """Return the layers whose inputs a head reads, ascending.

    On the top level, 0 is the embedding; in `eagle_config`, the output of the first layer. By default, what enters the
    third layer, the middle one, and the last but two.
    """
    origin = settings.nested("eagle_config")
    layers = [output + 1 for output in origin.integers(_AUX_IDS)]
    if _AUX_IDS in settings:
        origin, layers = settings, settings.integers(_AUX_IDS)
    layers = layers or [2, model.num_layers // 2, model.num_layers - 3]
    if not all(0 <= layer < model.num_layers for layer in layers) or len(set(layers)) < len(layers):
        why = f"inputs of different layers are expected, of {model.num_layers} of {model.model}; found {layers}"
        raise origin.fail(_AUX_IDS, why)
    return tuple(sorted(layers))
