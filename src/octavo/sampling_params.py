"""Parameters of a request: how tokens are sampled, or its context pooled; its priority and its seed."""

import secrets
from collections.abc import Mapping, Sequence, Sized
from copy import copy
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import Any, Self

from octavo.errors import InvalidParameterError, UnknownOptionError
from octavo.structured_output import StructuredOutput

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_TOKEN_IDS = 4096
MAX_BAD_WORDS = 4096
MAX_BAD_WORD_CHARACTERS = 128  # of one: devices compare all words with as many tokens as the longest has
MAX_LOGIT_BIASES = 16384
MAX_ALLOWED_TOKEN_IDS = 2**19  # beyond any vocabulary
MAX_N = 16384
SEED_BITS = 64
_MASK = (1 << SEED_BITS) - 1
_LENGTHS = {
    "stop": (MAX_STOP_STRINGS, "strings"),
    "bad_words": (MAX_BAD_WORDS, "words"),
    "stop_token_ids": (MAX_STOP_TOKEN_IDS, "token ids"),
    "allowed_token_ids": (MAX_ALLOWED_TOKEN_IDS, "token ids"),
}


def _bounded(default: Any, low: float, high: float | None = None) -> Any:
    """A field whose value must be a number from `low` up to `high`; None: without end."""
    return field(default=default, metadata={"bounds": (low, high)})


class RequestPriority(IntEnum):
    """Five classes; smaller numbers run first. Waiting requests age, so `BACKGROUND` cannot starve."""

    CRITICAL = 0
    HIGH = 1
    NORMAL = 2
    LOW = 3
    BACKGROUND = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters. Frozen and self-validating: an instance is always valid, whatever the model.

    Limits that depend on the model (token ids, context length) are checked when the request enters the engine. Lists
    are accepted and stored as tuples. Keys of `dict` options are integers, or decimal strings as in JSON.

    The noise of a sample depends on `seed`, the output position and the token id, not on the prompt. Prompts with the
    same seed share it, so samples of different prompts are not independent: their first tokens are often equal. For
    independent samples that can be repeated, give each prompt its own seed, or none and the engine a `seed`.

    Raises InvalidParameterError: names the field, its value and the limit.
    """

    n: int = _bounded(1, 1, MAX_N)  # number of samples; their seeds are derived from `seed`
    temperature: float = _bounded(1.0, 0.0, 100.0)  # 0 is greedy: argmax, ties go to the lowest id
    top_p: float = _bounded(1.0, 0.0, 1.0)
    top_k: int = _bounded(0, -1, 2**31 - 1)  # 0 or -1: off; beyond any vocabulary: the largest integer of messages
    min_p: float = _bounded(0.0, 0.0, 1.0)
    presence_penalty: float = _bounded(0.0, -2.0, 2.0)
    frequency_penalty: float = _bounded(0.0, -2.0, 2.0)
    repetition_penalty: float = _bounded(1.0, 0.0, 100.0)
    logit_bias: Mapping[int, float] | None = None  # the number of entries of this and the lists below is limited
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()  # never generated; up to 4,096, of 128 characters each
    stop: Sequence[str] | str = ()  # up to 64 strings, 4,096 characters together
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = _bounded(16, 1)  # None: up to the end of the model's context
    min_tokens: int = _bounded(0, 0)
    seed: int | None = _bounded(None, 0, _MASK)  # None: random, and reported; see above for many prompts
    logprobs: int | None = _bounded(None, 0, MAX_LOGPROBS)  # number of top tokens, in addition to the sampled one
    prompt_logprobs: int | None = _bounded(None, 0, MAX_LOGPROBS)
    skip_special_tokens: bool = True
    structured_output: StructuredOutput | None = None  # constraint on the output
    speculative: bool = True  # speculate, if the engine can; the output is the same

    def __post_init__(self) -> None:
        self._store_lists()
        self._check_numbers()
        self._check_entries()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameterError("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if self.structured_output is not None and not isinstance(self.structured_output, StructuredOutput):
            raise InvalidParameterError("structured_output", self.structured_output, "must be a StructuredOutput")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Build from keyword options; for an unknown name, the error suggests the closest known one."""
        known = [spec.name for spec in fields(cls)]
        for name in options:
            if name not in known:
                raise UnknownOptionError("sampling parameter", name, known)
        return cls(**options)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed, validated again."""
        return replace(self, **changes)

    def for_sample(self, seed: int) -> Self:
        """Return the parameters of one of `n` samples; they are not validated again, which long lists make slow."""
        sample = copy(self)
        object.__setattr__(sample, "n", 1)
        object.__setattr__(sample, "seed", seed)
        return sample

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def is_filtered(self) -> bool:
        """Whether a filter may keep some tokens from being sampled: top-k, top-p or min-p."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed before a token is selected, other than by bad words and constraints."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.min_tokens
        )

    def _store_lists(self) -> None:
        for name, (limit, kind) in _LENGTHS.items():
            value = (self.stop,) if name == "stop" and isinstance(self.stop, str) else getattr(self, name)
            if value is not None or name == "stop":
                if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
                    raise InvalidParameterError(name, value, "must be a list")
                object.__setattr__(self, name, tuple(value))
                _check_length(name, getattr(self, name), limit, kind)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _integer_keys(self.logit_bias))

    def _check_numbers(self) -> None:
        for name, kind, bounds in _BOUNDS:
            value = getattr(self, name)
            if value is not None or kind in (int, float):
                (_check_float if kind is float else _check_integer)(name, value, *bounds)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "speculative"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameterError(name, getattr(self, name), "must be true or false")
        if self.top_p == 0.0:
            raise InvalidParameterError("top_p", self.top_p, "greater than 0 and at most 1")
        if self.repetition_penalty == 0.0:
            raise InvalidParameterError("repetition_penalty", self.repetition_penalty, "greater than 0")
        for token_id, bias in (self.logit_bias or {}).items():
            _check_float(f"logit_bias[{token_id}]", bias, -100.0, 100.0)

    def _check_entries(self) -> None:
        for name, limit in (("stop", 4096), ("bad_words", 65536)):
            for text in getattr(self, name):
                if not isinstance(text, str) or not text:
                    raise InvalidParameterError(name, text, "every entry must be a non-empty string")
            if (total := sum(map(len, getattr(self, name)))) > limit:
                wanted = f"at most {limit} characters in all of them together"
                raise InvalidParameterError(name, f"{total} characters", wanted)
        if (longest := max(map(len, self.bad_words), default=0)) > MAX_BAD_WORD_CHARACTERS:
            wanted = f"at most {MAX_BAD_WORD_CHARACTERS} characters in each word"
            raise InvalidParameterError("bad_words", f"{longest} characters", wanted)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidParameterError("allowed_token_ids", (), "at least one id, or None for all")
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token_id in getattr(self, name) or ():
                _check_integer(name, token_id, 0, None)


_BOUNDS = [(spec.name, spec.type, spec.metadata["bounds"]) for spec in fields(SamplingParams) if spec.metadata]


def draw_seed() -> int:
    """Draw the seed of a request that has none."""
    return secrets.randbits(SEED_BITS)


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of sample `index` of a request: `seed` itself for sample 0, 64 well-mixed bits for the others.

    Different indices give different seeds, because every step below is a bijection. Source: SplitMix64 (Steele, Lea and
    Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


_POOLINGS = ("last", "mean", "cls")


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingParams:
    """Of a request whose answer is a vector: hidden states of its tokens, after the model's final norm, made one.

    With `label_token_ids` it is another one: the logarithms of the probabilities of these tokens, as the next one.

    Raises InvalidParameterError: names the field, its value and the limit.
    """

    normalize: bool | None = (
        None  # to length 1, so that dot products are cosines; None: as the model's files say, else so
    )
    dimensions: int | None = None  # only the first ones, for models trained so (Matryoshka); None: all
    pooling: str | None = None  # last, mean or cls, the first token; None: as the model's files say, else the last
    label_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.normalize, bool | None):
            raise InvalidParameterError("normalize", self.normalize, "must be a boolean")
        if self.dimensions is not None:
            _check_integer("dimensions", self.dimensions, 1, None)
        if self.pooling is not None and self.pooling not in _POOLINGS:
            raise InvalidParameterError("pooling", self.pooling, f"one of {', '.join(_POOLINGS)}")
        if self.label_token_ids is not None:
            if not self.label_token_ids:
                raise InvalidParameterError("label_token_ids", self.label_token_ids, "at least one token id")
            for token_id in self.label_token_ids:
                _check_integer("label_token_ids", token_id, 0, None)


def _check_length(field: str, entries: Sized, limit: int, kind: str) -> None:
    if len(entries) > limit:
        raise InvalidParameterError(field, f"{len(entries)} {kind}", f"at most {limit}")


def _integer_keys(bias: Mapping[Any, Any]) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise InvalidParameterError("logit_bias", bias, "must map token ids to numbers")
    _check_length("logit_bias", bias, MAX_LOGIT_BIASES, "token ids")
    try:
        table = {int(key): value for key, value in bias.items() if not isinstance(key, (bool, float))}
    except (TypeError, ValueError) as error:
        raise InvalidParameterError("logit_bias", list(bias), "keys must be token ids") from error
    if len(table) != len(bias) or any(key < 0 for key in table):
        raise InvalidParameterError("logit_bias", list(bias), "keys must be distinct token ids, 0 or more")
    return table


def _check_integer(field: str, value: object, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParameterError(field, value, "must be an integer")
    if value < low or (high is not None and value > high):
        raise InvalidParameterError(field, value, f"at least {low}" if high is None else f"between {low} and {high}")


def _check_float(field: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidParameterError(field, value, "must be a number")
    if not low <= value <= high:  # also catches NaN
        raise InvalidParameterError(field, value, f"between {low:g} and {high:g}")


# In place of a pooled request's: room for one token, which nobody samples.
NO_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True, speculative=False)
