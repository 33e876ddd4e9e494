"""Converts `EngineCoreOutputs` to text, in one loop over the batch, and keeps what is known of each request meanwhile.

The core knows no text.
"""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from octavo.contracts.engine import (
    AdmittedRequest,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishedRequest,
    TokenLogprobs,
)
from octavo.engine.input_processor import ProcessedRequest
from octavo.engine.stop_strings import StopFinder, StopStringMatcher
from octavo.errors import InvalidParameterError
from octavo.metrics.collect import EngineMetrics
from octavo.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.tokenizer.detokenizer import Detokenizer
from octavo.tokenizer.tokenizer import Tokenizer


class CompletionDelta(msgspec.Struct, frozen=True):
    """New output of one sample since the last `take`; the last one has a `finish_reason`."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None  # one entry per token of `token_ids`
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    error_type: str | None = None


@dataclass(slots=True, eq=False)
class CompletionState:
    """One sample: its detokenizer, stop string matcher and output so far.

    `matcher` looks for the stop strings of `params` in all of the text, `finder` in a part of it; None: nobody does.
    """

    request_id: str  # by which the core knows it
    params: SamplingParams
    prompt_ids: InitVar[list[int]]
    tokenizer: Tokenizer
    matcher: StopStringMatcher | None = None
    finder: StopFinder | None = None
    seed: int = field(init=False)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None  # None: not asked for
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    error_type: str | None = None
    last_token_time_s: float | None = None
    _detokenizer: Detokenizer = field(init=False)
    _text: list[str] = field(default_factory=list)
    _num_taken: int = 0  # tokens returned by `take`
    _is_taken: bool = False  # `take` has returned the final delta

    def __post_init__(self, prompt_ids: list[int]) -> None:
        assert self.params.seed is not None
        self.seed = self.params.seed
        if self.params.logprobs is not None:
            self.logprobs = []
        self._detokenizer = Detokenizer(self.tokenizer.byte_table(self.params.skip_special_tokens), prompt_ids)

    @property
    def text(self) -> str:
        """All text that may be shown so far."""
        if len(self._text) > 1:
            self._text = ["".join(self._text)]
        return self._text[0] if self._text else ""

    def push(
        self, first_index: int, token_ids: list[int], logprobs: Sequence[TokenLogprobs], *, hides_last: bool = False
    ) -> None:
        """Add new tokens, the first of which is output token `first_index`; tokens repeated by a replay are skipped.

        `hides_last`: the last one ended the sample. It counts, but its text is shown only on request.
        """
        num_repeated, num_shown = len(self.token_ids) - first_index, len(token_ids)
        if hides_last and not self.params.include_stop_str_in_output:
            num_shown -= 1
        assert num_repeated >= 0, f"{self.request_id}: tokens {len(self.token_ids)} to {first_index} are missing"
        for offset in range(num_repeated, len(token_ids)):
            self.token_ids.append(token_ids[offset])
            if self.logprobs is not None:
                self.logprobs.append(readable_logprobs(logprobs[offset], self.tokenizer))
                self.cumulative_logprob += logprobs[offset].logprobs[0]
            if offset < num_shown:
                self._show(self._detokenizer.push((token_ids[offset],)))
            if self.finish_reason is not None:
                return

    def end(self, report: FinishedRequest) -> None:
        """Record how the core ended this sample."""
        self.finish_reason, self.error, self.error_type = report.finish_reason, report.error, report.error_type
        self.stop_reason = report.stop_token_id
        self._show(self._detokenizer.flush())  # what was held back: an incomplete character, then
        if self.matcher is not None:  # the beginning of a stop string
            self._text.append(self.matcher.flush())
        if self.finder is not None and not isinstance(self.stop_reason, str):
            may_stop = self.finish_reason in ("stop", "length") and len(self.token_ids) >= self.params.min_tokens
            text, stop = self.finder.finish(is_cut=self.finish_reason == "length", may_stop=may_stop)
            self._text.append(text)
            if stop is not None:
                self.finish_reason, self.stop_reason = "stop", stop

    def snapshot(self, index: int) -> CompletionOutput:
        """Return the whole output so far."""
        return CompletionOutput(
            index=index,
            text=self.text,
            token_ids=list(self.token_ids),
            seed=self.seed,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
            error_type=self.error_type,
        )

    def take(self, index: int) -> CompletionDelta | None:
        """Return new output since the last call, None if there is none. Taken text is not kept for `snapshot`."""
        start, self._num_taken = self._num_taken, len(self.token_ids)
        if (start == self._num_taken and self.finish_reason is None) or self._is_taken:
            return None
        self._is_taken = self.finish_reason is not None
        text = "".join(self._text)
        self._text.clear()
        return CompletionDelta(
            index,
            text,
            self.token_ids[start:],
            None if self.logprobs is None else self.logprobs[start:],
            self.finish_reason,
            self.stop_reason,
            self.error,
            self.error_type,
        )

    def take_each(self, index: int) -> list[CompletionDelta]:
        """Return what `take` does, token by token: so the deltas do not depend on how many tokens a step gave."""
        texts = list(self._text)  # one per token that is shown, then what the end has released
        whole = self.take(index)
        if whole is None or len(whole.token_ids) < 2:
            return [] if whole is None else [whole]
        last = len(whole.token_ids) - 1
        deltas = [
            CompletionDelta(index, text, [token_id], None if whole.logprobs is None else [whole.logprobs[number]])
            for number, (text, token_id) in enumerate(zip(texts[:last], whole.token_ids[:last], strict=True))
        ]
        rest = msgspec.structs.replace(
            whole,
            text="".join(texts[last:]),
            token_ids=whole.token_ids[last:],
            logprobs=None if whole.logprobs is None else whole.logprobs[last:],
        )
        return [*deltas, rest]

    def _show(self, delta: str) -> None:
        """Add text that cannot be part of a stop string; end at a complete one."""
        may_stop, stop = len(self.token_ids) >= self.params.min_tokens, None
        if self.finder is not None:
            delta, stop = self.finder.push(delta) if may_stop else (self.finder.skip(delta), None)
        elif self.matcher is not None and may_stop:
            delta, stop = self.matcher.push(delta)
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
        self._text.append(delta)


@dataclass(slots=True, eq=False)
class RequestState:
    """One prompt with its samples."""

    processed: ProcessedRequest
    tokenizer: Tokenizer
    request_id: str = field(init=False)  # the user's name for it
    samples: list[CompletionState] = field(init=False)  # in seed order
    admitted: AdmittedRequest | None = None  # the first sample that ran
    num_prefilled_tokens: int = 0  # of the prompt, while it takes several steps
    shows_progress: bool = False  # its reader is told of these
    first_token_time_s: float | None = None
    finished_time_s: float | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    embedding: list[float] | None = None
    origin: object = None  # what an observer knows of where it comes from
    counts: Counter[str] = field(default_factory=Counter)  # of the core, by fields of `RequestMetrics`

    def __post_init__(self) -> None:
        processed, params = self.processed, self.processed.params
        self.request_id = processed.request_id
        new_finder = processed.new_stop_finder
        searches_all = params.stop and new_finder is None
        matcher = StopStringMatcher(params.stop, params.include_stop_str_in_output) if searches_all else None
        self.samples = [
            CompletionState(
                sample.request_id,
                sample.params,
                processed.prompt_token_ids,
                self.tokenizer,
                None if matcher is None else matcher.for_another(),
                None if new_finder is None else new_finder(),
            )
            for sample in processed.samples
        ]

    @property
    def is_finished(self) -> bool:
        for sample in self.samples:  # noqa: SIM110 - called per token; a generator costs three times as much
            if sample.finish_reason is None:
                return False
        return True

    def unfinished_core_ids(self) -> list[str]:
        """Return the ids by which the core knows the samples that have not finished."""
        return [sample.request_id for sample in self.samples if sample.finish_reason is None]

    @property
    def request(self) -> EngineCoreRequest:
        """The first sample as the core got it."""
        return self.processed.samples[0]

    @property
    def num_images(self) -> int:
        extra = self.request.extra_inputs
        return 0 if extra is None else extra.num_images

    @property
    def num_output_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.processed.prompt_token_ids)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return self.admitted.num_cached_tokens if self.admitted else 0

    def record_vector(self, vector: bytes) -> None:
        """Record the answer of a request that is pooled: float32."""
        params, embedding = self.processed.pooling, np.frombuffer(vector, dtype=np.float32).astype(np.float64)
        assert params is not None
        embedding = embedding[: params.dimensions]
        length = np.linalg.norm(embedding) if params.normalize else 0.0
        self.embedding = (embedding / length if length else embedding).tolist()

    def snapshot(self) -> RequestOutput:
        """Return the whole output so far as the user sees it."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.processed.prompt,
            prompt_token_ids=self.processed.prompt_token_ids,
            outputs=[sample.snapshot(index) for index, sample in enumerate(self.samples)],
            finished=self.is_finished,
            prompt_logprobs=self.prompt_logprobs,
            embedding=self.embedding,
            metrics=self.times(),
        )

    def times(self) -> RequestMetrics:
        """Return the times of events so far."""
        return RequestMetrics(
            arrival_time_s=self.request.arrival_time_s,
            first_scheduled_time_s=self.admitted.scheduled_time_s if self.admitted else None,
            first_token_time_s=self.first_token_time_s,
            finished_time_s=self.finished_time_s,
            num_cached_tokens=self.num_cached_tokens,
            **self.counts,
        )


def readable_logprobs(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """Return one position's logprobs as the user sees them: the chosen token first, then the most likely."""
    table: dict[int, Logprob] = {}
    for rank, (token_id, logprob) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True)):
        if token_id not in table:  # the first is one of the most likely, too
            text = tokenizer.token_text(token_id)
            table[token_id] = Logprob(logprob=logprob, rank=rank or entry.rank, decoded_token=text)
    return table


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one step changed in the frontend."""

    changed: list[RequestState]  # unique, in step order
    to_abort: list[str]  # core requests ended by a stop string, which the core does not know yet
    num_tokens: int  # work done in the step, prompt tokens included


class RequestObserver(Protocol):
    """Is told of every request; neither method raises or blocks."""

    def began(self) -> object:
        """Return where the request that begins comes from: `RequestState.origin`."""

    def ended(self, state: RequestState) -> None:
        """All samples of the request have finished."""


class OutputProcessor:
    """Keeps the state of every unfinished request. Not thread-safe."""

    def __init__(self, tokenizer: Tokenizer, metrics: EngineMetrics) -> None:
        self.metrics = metrics
        self.observer: RequestObserver | None = None
        self._tokenizer = tokenizer
        self._requests: set[RequestState] = set()
        self._by_name: dict[str, RequestState] = {}  # requests that have not ended for the caller
        self._samples: dict[str, tuple[RequestState, CompletionState]] = {}  # unfinished samples by core request id

    def __contains__(self, request_id: object) -> bool:
        """Whether a request of this name has not ended for the caller."""
        return isinstance(request_id, str) and request_id in self._by_name

    def __len__(self) -> int:
        """The number of requests that the core has not finished, or whose end is still on its way here."""
        return len(self._requests)

    def unfinished(self) -> Iterable[tuple[RequestState, CompletionState]]:
        """The samples that have not ended, each with its request."""
        return self._samples.values()

    def check_free(self, request_id: str) -> None:
        """Raise InvalidParameterError if a request of this name has not ended for the caller."""
        if request_id in self._by_name:
            raise InvalidParameterError("request_id", request_id, "already in use by an unfinished request")

    def add(self, processed: ProcessedRequest) -> RequestState:
        """Register a request. Raises InvalidParameterError if its name was taken after it had been processed."""
        self.check_free(processed.request_id)
        state = RequestState(processed, self._tokenizer)
        if self.observer is not None:
            state.origin = self.observer.began()
        self._requests.add(state)
        self._by_name[state.request_id] = state
        self.metrics.record_arrival(state.request)
        self._samples.update({sample.request_id: (state, sample) for sample in state.samples})
        return state

    def find(self, request_id: str) -> RequestState | None:
        """Return the request of this name, unless it has ended for the caller."""
        if not isinstance(request_id, str):
            raise InvalidParameterError("request_id", request_id, "a string")
        return self._by_name.get(request_id)

    def release(self, state: RequestState) -> None:
        """Free the name of a request that has ended for the caller, though the core may not know yet."""
        if self._by_name.get(state.request_id) is state:
            del self._by_name[state.request_id]

    def withdraw(self, state: RequestState) -> None:
        """Forget a request that was added but has not reached the core."""
        self._requests.discard(state)
        for sample in state.samples:
            self._samples.pop(sample.request_id, None)
        self.release(state)
        self.metrics.record_departure(state.request, has_run=False)

    def process(self, outputs: EngineCoreOutputs) -> StepResult:
        """Process one step: detokenize, look for stop strings, record what has finished."""
        now_s = time.time()
        changed: dict[RequestState, None] = {}
        ended: dict[RequestState, None] = {}  # requests with a sample that has ended
        to_abort: list[str] = []
        num_by_last_time: dict[float, int] = {}
        self._record_events(outputs)
        changed.update(dict.fromkeys(self._record_progress(outputs)))
        start = 0
        for core_id, count, first in zip(outputs.req_ids, outputs.num_new_tokens, outputs.first_indices, strict=True):
            token_ids = outputs.new_token_ids[start : start + count]
            start += count
            if core_id not in self._samples:
                continue  # ended here by a stop string or an abort, which the core did not know yet
            state, sample = self._samples[core_id]
            if state.first_token_time_s is None:
                state.first_token_time_s = now_s
                self.metrics.record_first_token(state.request.arrival_time_s, state.num_prompt_tokens, now_s)
            elif (last_s := sample.last_token_time_s) is not None:
                num_by_last_time[last_s] = num_by_last_time.get(last_s, 0) + 1
            sample.last_token_time_s = now_s
            changed[state] = None
            report = outputs.finished.get(core_id)
            hides_last = report is not None and report.finish_reason == "stop" and not report.shows_last_token
            sample.push(first, token_ids, outputs.logprobs.get(core_id, ()), hides_last=hides_last)
            if sample.finish_reason is not None:  # by a stop string
                ended[state] = None
                to_abort.append(core_id)
        for core_id, report in outputs.finished.items():
            if core_id in self._samples:
                state, sample = self._samples[core_id]
                changed[state] = ended[state] = None
                state.counts.update(report.counts)
                if sample.finish_reason is None:
                    sample.end(report)
        self._retire(ended, now_s)
        self.metrics.record_step(outputs, num_by_last_time, now_s)
        return StepResult(
            changed=list(changed),
            to_abort=[core_id for core_id in to_abort if core_id not in outputs.finished],
            num_tokens=outputs.num_scheduled_tokens,
        )

    def _record_events(self, outputs: EngineCoreOutputs) -> None:
        for core_id, admitted in outputs.admitted.items():
            if core_id in self._samples:
                state, _ = self._samples[core_id]
                if state.admitted is None:
                    state.admitted = admitted
                    self.metrics.record_start(state.request)
        for core_id, vector in outputs.pooled.items():
            if core_id in self._samples:
                state, _ = self._samples[core_id]
                state.record_vector(vector)
                self.metrics.num_prompt_tokens += state.num_prompt_tokens
        for core_id, entries in outputs.prompt_logprobs.items():
            if core_id in self._samples:
                self._samples[core_id][0].prompt_logprobs = [
                    None if entry is None else readable_logprobs(entry, self._tokenizer) for entry in entries
                ]

    def _record_progress(self, outputs: EngineCoreOutputs) -> list[RequestState]:
        """Note how much of their prompts is computed, and return those whose readers are told."""
        told = []
        for core_id, num_tokens in outputs.prefilled.items():
            if core_id in self._samples and (state := self._samples[core_id][0]).shows_progress:
                state.num_prefilled_tokens = max(state.num_prefilled_tokens, num_tokens)
                told.append(state)
        return told

    def _retire(self, ended: Iterable[RequestState], now_s: float) -> None:
        """Drop finished samples and requests."""
        for state in ended:
            for sample in state.samples:
                if sample.finish_reason is not None:
                    self._samples.pop(sample.request_id, None)
            if state.is_finished:
                state.finished_time_s = now_s
                self._requests.remove(state)
                self.release(state)
                self.metrics.record_departure(state.request, has_run=state.admitted is not None)
                samples = [(sample.finish_reason or "", len(sample.token_ids)) for sample in state.samples]
                self.metrics.record_end(
                    state.times(), state.num_prompt_tokens, samples, state.processed.params.max_tokens
                )
                if self.observer is not None:
                    self.observer.ended(state)
