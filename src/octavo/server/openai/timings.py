"""How long an answer's phases took, and llama.cpp's field `timings`, where chat programs find tokens per second."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import msgspec
from msgspec import UNSET, UnsetType

from octavo.engine.output_processor import RequestState

_MS = 1000.0
_END = b"}\n\n"  # of a chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class Phases:
    """Durations in seconds, of all prompts of a reply together; what has not ended lasts until now."""

    total_s: float  # since it arrived
    prompt_s: float  # from the start of the first prompt to the first token after the last one
    output_s: float  # since the first token

    @classmethod
    def of(cls, states: Sequence[RequestState]) -> Self:
        """Return the phases of these requests. A clock that was set back makes none of them negative."""
        times, now_s = [state.times() for state in states], time.time()
        arrived_s = min(each.arrival_time_s for each in times)
        started_s = min(each.first_scheduled_time_s or each.arrival_time_s for each in times)
        first_s = [each.first_token_time_s or each.finished_time_s or now_s for each in times]
        ended_s = max(each.finished_time_s or now_s for each in times)
        return cls(
            total_s=max(0.0, ended_s - arrived_s),
            prompt_s=max(0.0, max(first_s) - started_s),
            output_s=max(0.0, ended_s - min(first_s)),
        )


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens, milliseconds and rates. Rates are over the tokens that are counted: a cached prompt token is not."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | UnsetType = UNSET
    draft_n_accepted: int | UnsetType = UNSET

    @classmethod
    def of(cls, states: Sequence[RequestState], num_output_tokens: int) -> Self:
        """Return what these requests have taken so far."""
        phases = Phases.of(states)
        num_cached = sum(state.num_cached_tokens for state in states)
        num_prompt = sum(state.num_prompt_tokens for state in states) - num_cached
        prompt_ms, output_ms = phases.prompt_s * _MS, phases.output_s * _MS
        times = [state.times() for state in states]
        num_drafts = sum(each.num_drafts for each in times)
        return cls(
            cache_n=num_cached,
            prompt_n=num_prompt,
            prompt_ms=round(prompt_ms, 3),
            prompt_per_token_ms=_ratio(prompt_ms, num_prompt),
            prompt_per_second=_ratio(num_prompt, phases.prompt_s),
            predicted_n=num_output_tokens,
            predicted_ms=round(output_ms, 3),
            predicted_per_token_ms=_ratio(output_ms, num_output_tokens),
            predicted_per_second=_ratio(num_output_tokens, phases.output_s),
            draft_n=num_drafts or UNSET,
            draft_n_accepted=sum(each.num_accepted_drafts for each in times) if num_drafts else UNSET,
        )


class PromptProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a prompt is computed, cached tokens included."""

    total: int
    cache: int
    processed: int
    time_ms: int

    @classmethod
    def of(cls, state: RequestState) -> Self:
        """Return the progress of a request that runs; with its first token, all of the prompt is computed."""
        total, start_s = state.num_prompt_tokens, state.times().first_scheduled_time_s
        end_s = state.first_token_time_s or time.time()
        return cls(
            total=total,
            cache=state.num_cached_tokens,
            processed=total if state.first_token_time_s else min(total, state.num_prefilled_tokens),
            time_ms=max(0, round((end_s - start_s) * _MS)) if start_s is not None else 0,
        )


def with_timings(frame: bytes, timings: Timings) -> bytes:
    """Return a chunk with one more field."""
    return _with_field(frame, b"timings", timings)


def with_progress(frame: bytes, progress: PromptProgress) -> bytes:
    """Return a chunk with one more field."""
    return _with_field(frame, b"prompt_progress", progress)


def _with_field(frame: bytes, name: bytes, value: msgspec.Struct) -> bytes:
    return frame.removesuffix(_END) + b',"' + name + b'":' + msgspec.json.encode(value) + _END


def _ratio(amount: float, of: float) -> float:
    return round(amount / of, 3) if of else 0.0
