"""Speculative decoding: `speculative_config`, whose keys have vLLM's names, and the draft model or head that drafts."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

from octavo.config.eagle3 import EagleConfig, read_eagle
from octavo.config.hf import read_model_config
from octavo.config.hf_quantization import resolve_quantization
from octavo.config.hub import resolve_model
from octavo.config.model import ModelConfig, QuantizationName
from octavo.config.mtp import MtpConfig, assumed_mtp, find_mtp, resolve_mtp
from octavo.config.parallel import ParallelConfig
from octavo.contracts.kv_cache import KVGroup
from octavo.errors import InvalidParameterError, ModelNotFoundError, UnsupportedModelError

logger = logging.getLogger(__name__)

SpeculativeMethod = Literal["ngram", "draft_model", "eagle3", "mtp", "none"]
_METHODS = ", ".join(get_args(SpeculativeMethod))
_MODEL_METHODS = {
    "draft_model": "the draft model: a folder, GGUF file or Hub id",
    "eagle3": "the EAGLE-3 head: a folder or Hub id",
    "mtp": "a GGUF file with an MTP head; by default, where the model is",
}
_DEFAULT_COUNTS = {"ngram": 16, "mtp": 3}  # copies cost nothing to propose, and long ones are common
_LATER_METHODS = ("eagle", "medusa", "mlp_speculator", "suffix")  # of other engines
_OPTION = "speculative_config"
_LOOKUP_KEYS = ("prompt_lookup_min", "prompt_lookup_max")
_MAX_MATCH = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeConfig:
    """How drafts are proposed, and how many. Raises InvalidParameterError: names the key, its value and the limit."""

    method: SpeculativeMethod  # none: there are no drafts, even if the checkpoint has an MTP head
    num_speculative_tokens: int = 8  # maximum drafts per request and step
    model: str | None = None  # a draft model or a head: a checkpoint, as `model_name` would name it
    revision: str | None = None  # branch, tag or commit of it on the Hub
    quantization: QuantizationName | None = None  # of its weights at load; None: as in the checkpoint
    draft_tensor_parallel_size: int = 1  # a draft model runs whole on every rank
    prompt_lookup_min: int = 1  # tokens that must have occurred before
    prompt_lookup_max: int = 16  # among earlier occurrences, longer matches are preferred up to this
    adaptive: bool = True  # choose the number of drafts by measured acceptance and step times

    def __post_init__(self) -> None:
        if self.method not in get_args(SpeculativeMethod):
            is_later = str(self.method).endswith(_LATER_METHODS)
            what = "not supported by this version yet; " if is_later else ""
            raise _error("method", self.method, f"{what}one of {_METHODS}")
        _check_integer("num_speculative_tokens", self.num_speculative_tokens, 1, 64)
        _check_integer("prompt_lookup_min", self.prompt_lookup_min, 1, _MAX_MATCH)
        _check_integer("prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min, _MAX_MATCH)
        if type(self.adaptive) is not bool:
            raise _error("adaptive", self.adaptive, "must be true or false")
        if self.method in _MODEL_METHODS:
            if self.method != "mtp" or self.model is not None:
                _check_text("model", self.model, _MODEL_METHODS[self.method])
        elif given := [key for key in ("model", "revision", "quantization") if getattr(self, key) is not None]:
            *others, last = _MODEL_METHODS
            limit = f"only for methods {', '.join(others)} and {last}, not {self.method}"
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
        if isinstance(method, str) and method.endswith("_mtp"):  # vLLM's qwen3_next_mtp, say
            method = "mtp"
        if method != "ngram" and lengths:
            key, length = next(iter(lengths.items()))
            raise _error(key, length, f"only for method ngram, not {method}")
        if len(lengths) == 1:
            ((key, length),) = lengths.items()
            _check_integer(key, length, 1, _MAX_MATCH)
            lengths = dict.fromkeys(_LOOKUP_KEYS, length)
        count = _DEFAULT_COUNTS.get(method, 8) if isinstance(method, str) else 8
        return cls(**{"num_speculative_tokens": count, **options, "method": method, **lengths})


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftModelConfig:
    """The draft model of an engine, or a head, resolved. It is computed in the dtype of the model."""

    model: ModelConfig  # `max_model_len`: the engine's, or less if that is all it supports
    quantization: QuantizationName | None
    tokenizer_path: str
    kv_groups: tuple[int, ...]  # for each of its KV groups, the group of the engine's model whose blocks it uses
    eagle: EagleConfig | None = None  # of an EAGLE-3 head
    mtp: MtpConfig | None = None  # of an MTP head
    is_optional: bool = False  # nobody asked for it: where ranks cannot draft with it, there are no drafts

    @property
    def is_head(self) -> bool:
        """Whether it reads hidden states of the model; else it is a model of its own."""
        return self.eagle is not None or self.mtp is not None


def resolve_speculation(
    asked: Mapping[str, Any] | str | None,
    model: ModelConfig,
    parallel: ParallelConfig,
    quantization: QuantizationName | None,
    *,
    with_weights: bool,
) -> tuple[SpeculativeConfig | None, DraftModelConfig | None]:
    """Return how drafts are proposed, and the model or head that does it in the ranks; None: there is none.

    If nothing is asked for, an MTP head in the model's files drafts. `quantization` is that of the model at load.

    Raises ModelNotFoundError, CheckpointError, UnsupportedModelError: about the draft model or head.
    InvalidParameterError: it does not fit the model, or the degrees of parallelism.
    """
    if asked is None:
        return _by_default(model, parallel, quantization) if with_weights else (None, None)
    options = SpeculativeConfig.parse(asked)
    if options.method == "none":
        return None, None
    if options.method == "mtp":
        return options, _resolve_mtp(options, model, parallel, quantization, with_weights=with_weights)
    return options, _resolve_draft_model(options, model, parallel, with_weights=with_weights)


def _by_default(
    model: ModelConfig, parallel: ParallelConfig, quantization: QuantizationName | None
) -> tuple[SpeculativeConfig | None, DraftModelConfig | None]:
    """Return drafting with the MTP head of a model, if it has one that can."""
    found = find_mtp(model)
    if found is None:
        return None, None
    options = SpeculativeConfig.parse({"method": "mtp"})
    try:
        draft = _resolve_mtp(options, model, parallel, quantization, with_weights=True)
    except (UnsupportedModelError, InvalidParameterError) as error:
        logger.info("%s has an MTP head, which does not draft: %s", model.model, error)
        return None, None
    logger.info(
        'drafting with the MTP head of %s: the same bytes, in fewer steps; speculative_config={"method": "none"} '
        "turns it off",
        found.path,
    )
    return options, replace(draft, is_optional=True)


def _resolve_mtp(
    options: SpeculativeConfig,
    model: ModelConfig,
    parallel: ParallelConfig,
    quantization: QuantizationName | None,
    *,
    with_weights: bool,
) -> DraftModelConfig:
    _check_target(options.model or model.model, model, parallel, method=options.method)
    path = None if options.model is None else _resolved(options, with_weights=with_weights)
    found = find_mtp(model, path) if with_weights or path is not None else assumed_mtp(model)
    if found is None:
        where = options.model or f"{model.model} (in its files, or in a file mtp-*.gguf beside its GGUF file)"
        limit = f"one that fits the model: there is no MTP head for {model.architecture} in {where}"
        raise _error("method", "mtp", limit)
    with named_by_key():
        head, of_head = resolve_mtp(model, found, options.quantization, quantization)
    groups = tuple(_group_for(group, model.kv_groups, head) for group in head.kv_groups)
    return DraftModelConfig(
        model=head, quantization=of_head, tokenizer_path=str(found.path), kv_groups=groups, mtp=found.config
    )


def _resolved(options: SpeculativeConfig, *, with_weights: bool) -> Path:
    assert options.model is not None, "there is one to find"
    try:
        return resolve_model(options.model, options.revision, with_weights=with_weights)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"{_OPTION}: model: {error}") from error


def _resolve_draft_model(
    options: SpeculativeConfig, model: ModelConfig, parallel: ParallelConfig, *, with_weights: bool
) -> DraftModelConfig | None:
    if options.model is None:
        return None
    is_head = options.method == "eagle3"
    _check_target(options.model, model, parallel, method=options.method)
    path, eagle = _resolved(options, with_weights=with_weights), None
    if is_head:
        draft, eagle = read_eagle(options.model, path, model)
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


def _check_target(name: str, model: ModelConfig, parallel: ParallelConfig, *, method: SpeculativeMethod) -> None:
    num_stages, is_head = parallel.pipeline_parallel_size, method in ("eagle3", "mtp")
    if is_head and num_stages > 1:
        limit = f"1 with method {method}: a head reads hidden states of several stages"
        raise InvalidParameterError("pipeline_parallel_size", num_stages, limit)
    if not is_head and parallel.distributed_executor_backend == "ray" and num_stages > 1:
        limit = "1 with a draft model on Ray: stages on different processors would draft different tokens"
        raise InvalidParameterError("pipeline_parallel_size", num_stages, limit)
    if is_head and model.vision is not None:
        raise UnsupportedModelError(
            f"{_OPTION}: {name}: heads read the embeddings of tokens, and {model.model} "
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
