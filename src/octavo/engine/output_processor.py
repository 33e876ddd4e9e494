"""Converts `EngineCoreOutputs` to text, in one loop over the batch. The core knows no text."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.contracts.engine import EngineCoreOutputs
from octavo.engine.input_processor import ProcessedRequest
from octavo.engine.request_state import CompletionState, RequestState, readable_logprobs
from octavo.errors import InvalidParameterError
from octavo.metrics.collect import EngineMetrics
from octavo.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one step changed in the frontend."""

    changed: list[RequestState]  # unique, in step order
    to_abort: list[str]  # core requests ended by a stop string, which the core does not know yet
    num_tokens: int  # work done in the step, prompt tokens included


class OutputProcessor:
    """Keeps the state of every unfinished request. Not thread-safe."""

    def __init__(self, tokenizer: Tokenizer, metrics: EngineMetrics) -> None:
        self.metrics = metrics
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

    def check_free(self, request_id: str) -> None:
        """Raise InvalidParameterError if a request of this name has not ended for the caller."""
        if request_id in self._by_name:
            raise InvalidParameterError("request_id", request_id, "already in use by an unfinished request")

    def add(self, processed: ProcessedRequest) -> RequestState:
        """Register a request, to process its outputs.

        Raises:
            InvalidParameterError: its name was taken after it had been processed.
        """
        self.check_free(processed.request_id)
        state = RequestState(processed, self._tokenizer)
        self._requests.add(state)
        self._by_name[state.request_id] = state
        self.metrics.record_arrival(state.request)
        self._samples.update({sample.request_id: (state, sample) for sample in state.samples})
        return state

    def find(self, request_id: str) -> RequestState | None:
        """Return the request of this name, unless it has ended for the caller.

        Raises:
            InvalidParameterError: this is no name.
        """
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
            if self._push(sample, first, token_ids, outputs):
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

    def _push(self, sample: CompletionState, first: int, token_ids: list[int], outputs: EngineCoreOutputs) -> bool:
        """Add new tokens to a sample; return whether a stop string ended it."""
        logprobs = outputs.logprobs.get(sample.request_id, ())
        report = outputs.finished.get(sample.request_id)
        if report is not None and report.finish_reason == "stop" and not report.shows_last_token:
            sample.push(first, token_ids[:-1], logprobs)
            if sample.finish_reason is None:
                sample.push_stop_token(first + len(token_ids) - 1, token_ids[-1], logprobs[-1:])
        else:
            sample.push(first, token_ids, logprobs)
        return sample.finish_reason is not None

    def _record_events(self, outputs: EngineCoreOutputs) -> None:
        for core_id, admitted in outputs.admitted.items():
            if core_id in self._samples:
                state, _ = self._samples[core_id]
                if state.admitted is None:
                    state.admitted = admitted
                    self.metrics.record_start(state.request)
        for core_id, entries in outputs.prompt_logprobs.items():
            if core_id in self._samples:
                self._samples[core_id][0].prompt_logprobs = [
                    None if entry is None else readable_logprobs(entry, self._tokenizer) for entry in entries
                ]

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
