"""The EAGLE-3 head of `speculative_config`: found, read, and checked against the model whose hidden states it reads.

There are several spellings of its `config.json`: that of the original repository, SpecForge's and SGLang's with an
`eagle_config`, and that of vLLM's speculators, with the layer's keys under `transformer_layer_config`.
"""

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from octavo.config.draft_model import kv_groups_for, resolve_drafting
from octavo.config.hf import model_config_of
from octavo.config.hf_quantization import resolve_quantization
from octavo.config.json_fields import JsonFields
from octavo.config.model import ModelConfig
from octavo.config.speculative import DraftModelConfig, EagleConfig, SpeculativeConfig, named_by_key
from octavo.errors import InvalidParameterError, UnsupportedModelError

_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
_PREFIX, _SUFFIX, _BASE = "Eagle3", "ForCausalLMEagle3", "LlamaForCausalLM"
_IDS = "eagle_aux_hidden_state_layer_ids"
_DEFAULTS = MappingProxyType({"num_hidden_layers": 1})


def resolve_eagle_head(options: SpeculativeConfig, model: ModelConfig, *, with_weights: bool) -> DraftModelConfig:
    """Return the head's configuration. Its dtype is the model's.

    Raises:
        ModelNotFoundError, CheckpointError, UnsupportedModelError: about the head, or a model that none can read.
        InvalidParameterError: they do not fit together; names the key, its value and the model's.
    """
    assert options.model is not None, "checked by SpeculativeConfig"
    _check_model(options.model, model)
    path = resolve_drafting(options, with_weights=with_weights)
    fields = _head_fields(options.model, path)
    head = model_config_of(fields, path, model=options.model, dtype=model.dtype)
    head = replace(head, max_model_len=min(head.max_model_len, model.max_model_len), tie_word_embeddings=False)
    eagle = _read_eagle(fields, head, model)
    with named_by_key():
        quantization, head = resolve_quantization(options.quantization, head, path)
    return DraftModelConfig(
        model=head,
        quantization=quantization,
        tokenizer_path=str(path),
        kv_groups=kv_groups_for(head, model),
        eagle=eagle,
    )


def _check_model(name: str, model: ModelConfig) -> None:
    if model.vision is not None:
        raise UnsupportedModelError(
            f"speculative_config: {name}: EAGLE-3 heads read the embeddings of tokens, and {model.model} "
            f"({model.architecture}) has images in their place"
        )


def _head_fields(name: str, path: Path) -> JsonFields:
    """Return the keys of `config.json`, as of a Llama of one layer."""
    if path.is_file():
        raise UnsupportedModelError(f"speculative_config: {name}: EAGLE-3 heads are read from folders, not GGUF files")
    fields = JsonFields.read(path / "config.json")
    names = fields.texts("architectures")
    if not any(each in _ARCHITECTURES or each.startswith(_PREFIX) or each.endswith(_SUFFIX) for each in names):
        known = ", ".join(_ARCHITECTURES)
        raise UnsupportedModelError(f"{fields.origin}: architectures={names}: not an EAGLE-3 head, such as {known}")
    layer = fields.nested("transformer_layer_config")
    values: dict[str, Any] = {**fields.values, **layer.values, "architectures": [_BASE]}
    if layer.values:
        values.setdefault("norm_before_residual", True)
    head = JsonFields(fields.origin, values).with_defaults(_DEFAULTS)
    if (num_layers := head.integer("num_hidden_layers")) != 1:
        raise UnsupportedModelError(f"{head.origin}: num_hidden_layers={num_layers}: heads of one layer are supported")
    return head


def _read_eagle(fields: JsonFields, head: ModelConfig, model: ModelConfig) -> EagleConfig:
    if not fields.nested("eagle_config").flag("use_aux_hidden_state", True):
        raise UnsupportedModelError(f"{fields.origin}: eagle_config: use_aux_hidden_state=False is not supported")
    target_hidden_size = fields.integer("target_hidden_size", head.hidden_size)
    if target_hidden_size != model.hidden_size:
        key = "target_hidden_size" if "target_hidden_size" in fields else "hidden_size"
        raise _misfit(head, f"its {key} is {target_hidden_size}, but {model.model} has {model.hidden_size}")
    if head.vocab_size != model.vocab_size:
        raise _misfit(head, f"its vocab_size is {head.vocab_size}, but {model.model} has {model.vocab_size}")
    draft_vocab_size = fields.integer("draft_vocab_size", head.vocab_size)
    if draft_vocab_size > head.vocab_size:
        raise fields.fail("draft_vocab_size", f"at most vocab_size ({head.vocab_size}) is expected")
    return EagleConfig(
        aux_layers=_aux_layers(fields, model),
        target_hidden_size=target_hidden_size,
        draft_vocab_size=draft_vocab_size,
        norm_before_residual=fields.flag("norm_before_residual", False),
    )


def _aux_layers(fields: JsonFields, model: ModelConfig) -> tuple[int, ...]:
    """Return the layers whose inputs the head reads, ascending.

    On the top level, 0 is the embedding; in `eagle_config`, the output of the first layer. By default, what enters the
    third layer, the middle one, and the last but two.
    """
    nested = fields.nested("eagle_config")
    origin, layers = nested, [output + 1 for output in nested.integers(_IDS)]
    if _IDS in fields:
        origin, layers = fields, fields.integers(_IDS)
    layers = layers or [2, model.num_layers // 2, model.num_layers - 3]
    if not all(0 <= layer < model.num_layers for layer in layers) or len(set(layers)) < len(layers):
        why = f"inputs of different layers are expected, of {model.num_layers} of {model.model}; found {layers}"
        raise origin.fail(_IDS, why)
    return tuple(sorted(layers))


def _misfit(head: ModelConfig, limit: str) -> InvalidParameterError:
    return InvalidParameterError("speculative_config", {"model": head.model}, limit)
