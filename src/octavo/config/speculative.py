"""Speculative decoding, as configured by `speculative_config`. Keys have vLLM's names."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, get_args

from octavo.config.model import ModelConfig, QuantizationName
from octavo.errors import InvalidParameterError

SpeculativeMethod = Literal["ngram", "draft_model", "eagle3"]
_MODEL_METHODS = ("draft_model", "eagle3")
_OPTION = "speculative_config"
_LATER_METHODS = ("eagle", "medusa", "mtp", "mlp_speculator", "suffix")  # of other engines
_MTP_SUFFIX = "_mtp"  # vLLM's names of the heads of a family, such as deepseek_mtp
_LOOKUP_KEYS = ("prompt_lookup_min", "prompt_lookup_max")
_DEFAULT_NUM_TOKENS = 8
_DEFAULT_NUM_COPIED = 16  # of ngram: they cost nothing to propose, and long copies are common
_MAX_NUM_TOKENS = 64
_DEFAULT_MIN_MATCH, _DEFAULT_MAX_MATCH = 1, 16
_MAX_MATCH = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeConfig:
    """How drafts are proposed, and how many.

    Raises:
        InvalidParameterError: names the key, its value and the limit.
    """

    method: SpeculativeMethod
    num_speculative_tokens: int = _DEFAULT_NUM_TOKENS  # maximum drafts per request and step
    model: str | None = None  # a draft model or EAGLE-3 head: a checkpoint, as `model_name` would name it
    revision: str | None = None  # branch, tag or commit of it on the Hub
    quantization: QuantizationName | None = None  # of its weights at load; None: as in the checkpoint
    draft_tensor_parallel_size: int = 1  # a draft model runs whole on every rank
    prompt_lookup_min: int = _DEFAULT_MIN_MATCH  # tokens that must have occurred before
    prompt_lookup_max: int = _DEFAULT_MAX_MATCH  # among earlier occurrences, longer matches are preferred up to this
    adaptive: bool = True  # choose the number of drafts by measured acceptance and step times

    def __post_init__(self) -> None:
        if self.method not in get_args(SpeculativeMethod):
            is_later = self.method in _LATER_METHODS or str(self.method).endswith(_MTP_SUFFIX)
            what = "not supported by this version yet; " if is_later else ""
            raise _error("method", self.method, f"{what}one of {', '.join(get_args(SpeculativeMethod))}")
        _check_integer("num_speculative_tokens", self.num_speculative_tokens, 1, _MAX_NUM_TOKENS)
        _check_integer("prompt_lookup_min", self.prompt_lookup_min, 1, _MAX_MATCH)
        _check_integer("prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min, _MAX_MATCH)
        if type(self.adaptive) is not bool:
            raise _error("adaptive", self.adaptive, "must be true or false")
        self._check_draft_model()

    def _check_draft_model(self) -> None:
        if self.method in _MODEL_METHODS and (not isinstance(self.model, str) or not self.model):
            is_head = self.method == "eagle3"
            what = (
                "the EAGLE-3 head: a folder or Hub id" if is_head else "the draft model: a folder, GGUF file or Hub id"
            )
            raise _error("model", self.model, what)
        if self.method not in _MODEL_METHODS:
            for key in ("model", "revision", "quantization"):
                if getattr(self, key) is not None:
                    limit = f"only for methods {' and '.join(_MODEL_METHODS)}, not {self.method}"
                    raise _error(key, getattr(self, key), limit)
        if self.revision is not None:
            _check_text("revision", self.revision, "a branch, tag or commit of the Hub")
        if self.quantization is not None and self.quantization not in get_args(QuantizationName):
            raise _error("quantization", self.quantization, f"one of {', '.join(get_args(QuantizationName))}")
        if self.draft_tensor_parallel_size != 1:
            limit = "1: a draft model runs whole on every rank"
            raise _error("draft_tensor_parallel_size", self.draft_tensor_parallel_size, limit)

    @classmethod
    def parse(cls, options: Mapping[str, Any] | str) -> Self:
        """Build from a mapping, or from its JSON text.

        As in vLLM, the method may be left out: a model is a draft model, a lookup length means prompt lookup, and one
        of the two lengths on its own sets both.
        """
        if isinstance(options, str):
            options = _decode(options)
        known = [spec.name for spec in fields(cls)]
        for key in options:
            if key not in known:
                raise InvalidParameterError(_OPTION, dict(options), f"unknown key {key!r}; one of {', '.join(known)}")
        lengths = {key: options[key] for key in _LOOKUP_KEYS if key in options}
        if "method" not in options and not lengths and "model" not in options:
            raise InvalidParameterError(
                _OPTION, dict(options), f"method: one of {', '.join(get_args(SpeculativeMethod))}"
            )
        method = options.get("method", "draft_model" if "model" in options else "ngram")
        if method in _MODEL_METHODS and lengths:
            key, length = next(iter(lengths.items()))
            raise _error(key, length, f"only for method ngram, not {method}")
        if len(lengths) == 1:
            ((key, length),) = lengths.items()
            _check_integer(key, length, 1, _MAX_MATCH)
            lengths = dict.fromkeys(_LOOKUP_KEYS, length)
        count = _DEFAULT_NUM_COPIED if method == "ngram" else _DEFAULT_NUM_TOKENS
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


def _decode(text: str) -> Mapping[str, Any]:
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidParameterError(_OPTION, text, f"not valid JSON: {error}") from error
    if not isinstance(options, dict):
        raise InvalidParameterError(_OPTION, text, 'must be a JSON object, such as {"method": "ngram"}')
    return options


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
