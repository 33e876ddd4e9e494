"""The requests of a benchmark, generated before it starts: prompts, lengths and times, determined by the seed.

Prompts for `completions` are random token ids, so their lengths are exact, and `ignore_eos` makes output lengths exact.
`chat` sends random words instead, whose prompt lengths are approximate.
"""

import random
from dataclasses import dataclass
from typing import Literal, Self

import msgspec

from octavo.errors import InvalidParameterError

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Span:
    """A range of integers from `low` to `high`, inclusive."""

    low: int
    high: int

    @classmethod
    def parse(cls, field: str, text: str, at_least: int) -> Self:
        """Parse `64` or `64:256`.

        Raises:
            InvalidParameterError: not a valid range, or below `at_least`.
        """
        low, _, high = text.partition(":")
        try:
            span = cls(int(low), int(high or low))
        except ValueError as error:
            raise InvalidParameterError(field, text, "must be like 64 or 64:256") from error
        if not at_least <= span.low <= span.high:
            raise InvalidParameterError(field, text, f"must be an ascending range from at least {at_least}")
        return span

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadSpec:
    """What to send. `rate` is in requests per second (Poisson process); None: all at once.

    `model` is None until the server's own model is known.
    """

    endpoint: Endpoint
    model: str | None
    num_prompts: int
    input_len: Span
    output_len: Span
    prefix_len: int
    num_prefixes: int
    token_ids: Span
    rate: float | None
    temperature: float
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRequest:
    """One request: `send_at_s` after the start of the run, with this body; `output_len` tokens are expected."""

    send_at_s: float
    body: bytes
    output_len: int


def plan_requests(spec: WorkloadSpec) -> list[PlannedRequest]:
    """Return the requests of a run in the order of sending.

    Each prompt starts with one of `num_prefixes` shared prefixes in turn, followed by tokens of its own.
    """
    source = random.Random(spec.seed)
    prefixes = [_tokens(spec, spec.prefix_len, source) for _ in range(spec.num_prefixes)]
    planned = []
    send_at_s = 0.0
    for number in range(spec.num_prompts):
        prompt = prefixes[number % len(prefixes)] + _tokens(spec, spec.input_len.draw(source), source)
        output_len = spec.output_len.draw(source)
        body = msgspec.json.encode({**_prompt_fields(spec, prompt), **_common_fields(spec, output_len)})
        planned.append(PlannedRequest(send_at_s=send_at_s, body=body, output_len=output_len))
        send_at_s += source.expovariate(spec.rate) if spec.rate else 0.0
    return planned


def _tokens(spec: WorkloadSpec, length: int, source: random.Random) -> list[int]:
    return source.choices(range(spec.token_ids.low, spec.token_ids.high + 1), k=length)


def _prompt_fields(spec: WorkloadSpec, prompt: list[int]) -> dict[str, object]:
    if spec.endpoint == "completions":
        return {"prompt": prompt}
    return {"messages": [{"role": "user", "content": " ".join(map(_word, prompt))}]}


def _word(number: int) -> str:
    """Return a short word for a number: one or two tokens with most tokenizers."""
    return f"{chr(97 + number % 26)}{chr(97 + number // 26 % 26)}"


def _common_fields(spec: WorkloadSpec, output_len: int) -> dict[str, object]:
    return {
        "model": spec.model,
        "max_tokens": output_len,
        "min_tokens": output_len,
        "ignore_eos": True,
        "temperature": spec.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
