"""Speculative decoding: `speculative_config`, whose keys have vLLM's names, and the draft model or head that it names.

An EAGLE-3 head's `config.json` has several spellings: that of the original repository, SpecForge's and SGLang's with an
`eagle_config`, and that of vLLM's speculators, with the layer's keys under `transformer_layer_config`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

from octavo.config.hf import model_config_of, read_model_config
from octavo.config.hf_quantization import resolve_quantization
from octavo.config.hub import resolve_model
from octavo.config.json_fields import JsonFields
from octavo.config.model import ModelConfig, QuantizationName
from octavo.config.parallel import ParallelConfig
from octavo.contracts.kv_cache import KVGroup
from octavo.errors import InvalidParameterError, ModelNotFoundError, UnsupportedModelError

SpeculativeMethod = Literal["ngram", "draft_model", "eagle3"]
_METHODS = ", ".join(get_args(SpeculativeMethod))
_MODEL_METHODS = {
    "draft_model": "the draft model: a folder, GGUF file or Hub id",
    "eagle3": "the EAGLE-3 head: a folder or Hub id",
}
_LATER_METHODS = ("_mtp", "eagle", "medusa", "mtp", "mlp_speculator", "suffix")  # of other engines
_OPTION = "speculative_config"
_LOOKUP_KEYS = ("prompt_lookup_min", "prompt_lookup_max")
_MAX_MATCH = 128
_HEADS = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
_AUX_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeConfig:
    """How drafts are proposed, and how many. Raises InvalidParameterError: names the key, its value and the limit."""

    method: SpeculativeMethod
    num_speculative_tokens: int = 8  # maximum drafts per request and step
    model: str | None = None  # a draft model or EAGLE-3 head: a checkpoint, as `model_name` would name it
    revision: str | None = None  # branch, tag or commit of it on the Hub
    quantization: QuantizationName | None = None  # of its weights at load; None: as in the checkpoint
    draft_tensor_parallel_size: int = 1  # a draft model runs whole on every rank
    prompt_lookup_min: int = 1  # tokens that must have occurred before
    prompt_lookup_max: int = 16  # among earlier occurrences, longer matches are preferred up to this
    adaptive: bool = True  # choose the number of drafts by measured acceptance and step times

    def __post_init__(self) -> None:
        if self.method not in get_args(SpeculativeMethod):
            is_later = str(self.method).endswith(_LATER_METHODS)  # vLLM's deepseek_mtp, say
            what = "not supported by this version yet; " if is_later else ""
            raise _error("method", self.method, f"{what}one of {_METHODS}")
        _check_integer("num_speculative_tokens", self.num_speculative_tokens, 1, 64)
        _check_integer("prompt_lookup_min", self.prompt_lookup_min, 1, _MAX_MATCH)
        _check_integer("prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min, _MAX_MATCH)
        if type(self.adaptive) is not bool:
            raise _error("adaptive", self.adaptive, "must be true or false")
        if self.method in _MODEL_METHODS:
            _check_text("model", self.model, _MODEL_METHODS[self.method])
        elif given := [key for key in ("model", "revision", "quantization") if getattr(self, key) is not None]:
            limit = f"only for methods {' and '.join(_MODEL_METHODS)}, not {self.method}"
            raise _error(given[0], getattr(self, given[0]), limit)
        if self.revision is not None:
            _check_text("revision", self.revision, "a branch, tag or commit of the Hub")
        if self.quantization is not None and self.quantization not in get_args(QuantizationName):
            raise _error("quantization", self.quantization, f"one of {', '.join(get_args(QuantizationName))}")
        if (size := self.draft_tensor_parallel_size) != 1:
            raise _error("draft_tensor_parallel_size", size, "1: a draft model runs whole on every rank")

    @classmethod
    def parse(cls, options: Mapping[str, Any] | str) -> Self:
        """Build from a mapping, or from its JSON text.

        As in vLLM, the method may be left out: a model is a draft model, a lookup length means prompt lookup, and one
        of the two lengths on its own sets both.
        """
        if isinstance(options, str):
            text = options
            try:
                options = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise InvalidParameterError(_OPTION, text, f"not valid JSON: {error}") from error
            if not isinstance(options, dict):
                raise InvalidParameterError(_OPTION, text, 'must be a JSON object, such as {"method": "ngram"}')
        known = [spec.name for spec in fields(cls)]
        for key in options:
            if key not in known:
                raise InvalidParameterError(_OPTION, dict(options), f"unknown key {key!r}; one of {', '.join(known)}")
        lengths = {key: options[key] for key in _LOOKUP_KEYS if key in options}
        if "method" not in options and not lengths and "model" not in options:
            raise InvalidParameterError(_OPTION, dict(options), f"method: one of {_METHODS}")
        method = options.get("method", "draft_model" if "model" in options else "ngram")
        if method in _MODEL_METHODS and lengths:
            key, length = next(iter(lengths.items()))
            raise _error(key, length, f"only for method ngram, not {method}")
        if len(lengths) == 1:
            ((key, length),) = lengths.items()
            _check_integer(key, length, 1, _MAX_MATCH)
            lengths = dict.fromkeys(_LOOKUP_KEYS, length)
        count = 16 if method == "ngram" else 8  # copies cost nothing to propose, and long ones are common
        return cls(**{"method": method, "num_speculative_tokens": count, **options, **lengths})


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleConfig:
    """What an EAGLE-3 head reads of the model, and drafts."""

    aux_layers: tuple[int, ...]  # of the model, ascending: those whose inputs it reads
    target_hidden_size: int  # of each
    draft_vocab_size: int  # tokens that it drafts
    norm_before_residual: bool = False  # its residual stream begins with the normalized hidden state


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftModelConfig:
    """The draft model of an engine, or its EAGLE-3 head, resolved. It is computed in the dtype of the model."""

    model: ModelConfig  # `max_model_len`: the engine's, or less if that is all it supports
    quantization: QuantizationName | None
    tokenizer_path: str
    kv_groups: tuple[int, ...]  # for each of its KV groups, the group of the engine's model whose blocks it uses
    eagle: EagleConfig | None = None  # None: a model of its own


def resolve_draft_model(
    options: SpeculativeConfig | None, model: ModelConfig, parallel: ParallelConfig, *, with_weights: bool
) -> DraftModelConfig | None:
    """Return the configuration of the model or head that drafts in the ranks; None if none does.

    Raises ModelNotFoundError, CheckpointError, UnsupportedModelError: about the draft model or head.
    InvalidParameterError: it does not fit the model, or the degrees of parallelism.
    """
    if options is None or options.model is None:
        return None
    is_head = options.method == "eagle3"
    _check_target(options.model, model, parallel, is_head=is_head)
    try:
        path = resolve_model(options.model, options.revision, with_weights=with_weights)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"{_OPTION}: model: {error}") from error
    eagle = None
    if is_head:
        settings = _head_fields(options.model, path)
        draft = model_config_of(settings, path, model=options.model, dtype=model.dtype)
        draft = replace(draft, tie_word_embeddings=False)
        eagle = _read_eagle(settings, draft, model)
    else:
        draft = read_model_config(path, model=options.model, dtype=model.dtype)
    if draft.recurrent_layers:
        raise UnsupportedModelError(
            f"{_OPTION}: {draft.model}: its recurrent states cannot roll back drafts that were rejected"
        )
    draft = replace(draft, max_model_len=min(draft.max_model_len, model.max_model_len))
    with named_by_key():
        quantization, draft = resolve_quantization(options.quantization, draft, path)
    groups = tuple(_group_for(group, model.kv_groups, draft) for group in draft.kv_groups)
    return DraftModelConfig(
        model=draft, quantization=quantization, tokenizer_path=str(path), kv_groups=groups, eagle=eagle
    )


def _check_target(name: str, model: ModelConfig, parallel: ParallelConfig, *, is_head: bool) -> None:
    num_stages = parallel.pipeline_parallel_size
    if is_head and num_stages > 1:
        limit = "1 with method eagle3: a head reads hidden states of several stages"
        raise InvalidParameterError("pipeline_parallel_size", num_stages, limit)
    if not is_head and parallel.distributed_executor_backend == "ray" and num_stages > 1:
        limit = "1 with a draft model on Ray: stages on different processors would draft different tokens"
        raise InvalidParameterError("pipeline_parallel_size", num_stages, limit)
    if is_head and model.vision is not None:
        raise UnsupportedModelError(
            f"{_OPTION}: {name}: EAGLE-3 heads read the embeddings of tokens, and {model.model} "
            f"({model.architecture}) has images in their place"
        )


def _group_for(group: KVGroup, groups: Sequence[KVGroup], draft: ModelConfig) -> int:
    """Return which of the model's `groups` keeps the blocks that a draft's needs; of several, what frees most."""
    reach = group.sliding_window or draft.max_model_len
    fitting = {
        index: each.sliding_window or draft.max_model_len
        for index, each in enumerate(groups)
        if each.kind != "recurrent" and (each.sliding_window is None or each.sliding_window >= reach)
    }
    if not fitting:
        windows = ", ".join(str(each.sliding_window) for each in groups)
        raise UnsupportedModelError(
            f"{_OPTION}: {draft.model} attends to {reach} tokens, but the model keeps only sliding windows "
            f"of {windows}, and a draft model uses the model's KV blocks"
        )
    return min(fitting, key=lambda index: fitting[index])


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


def _read_eagle(settings: JsonFields, head: ModelConfig, model: ModelConfig) -> EagleConfig:
    if not settings.nested("eagle_config").flag("use_aux_hidden_state", True):
        raise UnsupportedModelError(f"{settings.origin}: eagle_config: use_aux_hidden_state=False is not supported")
    hidden_key = "target_hidden_size" if "target_hidden_size" in settings else "hidden_size"
    target_hidden_size = settings.integer(hidden_key)
    for key, size, wanted in (
        (hidden_key, target_hidden_size, model.hidden_size),
        ("vocab_size", head.vocab_size, model.vocab_size),
    ):
        if size != wanted:
            raise _error("model", head.model, f"its {key} is {size}, but {model.model} has {wanted}")
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


@contextmanager
def named_by_key() -> Iterator[None]:
    """Let errors about a draft model's settings name the key of `speculative_config` rather than the model's option."""
    try:
        yield
    except InvalidParameterError as error:
        raise _error(error.field, error.value, error.limit) from error


def _check_text(key: str, value: object, what: str) -> None:
    if not isinstance(value, str) or not value:
        raise _error(key, value, what)


def _check_integer(key: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise _error(key, value, f"an integer between {low} and {high}")


def _error(key: str, value: object, limit: str) -> InvalidParameterError:
    """The field is the option itself, which is what flags, variables and files set."""
    return InvalidParameterError(_OPTION, {key: value}, limit)
