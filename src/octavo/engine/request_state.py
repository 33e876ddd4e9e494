"""The frontend's state of a request until it finishes: text so far, logprobs, times."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field

import msgspec

from octavo.contracts.engine import AdmittedRequest, EngineCoreRequest, FinishedRequest, TokenLogprobs
from octavo.engine.input_processor import ProcessedRequest
from octavo.engine.stop_strings import StopFinder, StopStringMatcher
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
        self._detokenizer = Detokenizer(
            self.tokenizer, skip_special_tokens=self.params.skip_special_tokens, prompt_token_ids=prompt_ids
        )

    @property
    def text(self) -> str:
        """All text that may be shown so far."""
        if len(self._text) > 1:
            self._text = ["".join(self._text)]
        return self._text[0] if self._text else ""

    def push(self, first_index: int, token_ids: list[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Add new tokens, the first of which is output token `first_index`; tokens repeated by a replay are skipped."""
        num_repeated = len(self.token_ids) - first_index
        assert num_repeated >= 0, f"{self.request_id}: tokens {len(self.token_ids)} to {first_index} are missing"
        for offset in range(num_repeated, len(token_ids)):
            self.token_ids.append(token_ids[offset])
            if self.logprobs is not None:
                self._push_logprobs(logprobs[offset])
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

    def push_stop_token(self, first_index: int, token_id: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Add the token that ended the sample: it counts, but its text is shown only on request."""
        if self.params.include_stop_str_in_output:
            self.push(first_index, [token_id], logprobs)
        elif first_index == len(self.token_ids):
            self.token_ids.append(token_id)
            if self.logprobs is not None:
                self._push_logprobs(logprobs[0])

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
        """Return new output since the last call, None if there is none; `index` is passed through.

        Taken text is not kept for `snapshot`.
        """
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

    def _show(self, delta: str) -> None:
        """Add text that cannot be part of a stop string; end at a complete one."""
        may_stop, stop = len(self.token_ids) >= self.params.min_tokens, None
        if self.finder is not None:
            delta, stop = self.finder.push(delta) if may_stop else (self.finder.skip(delta), None)
        elif self.matcher is not None and may_stop:
            delta, stop = self.matcher.push(delta)
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
        if delta:
            self._text.append(delta)

    def _push_logprobs(self, entry: TokenLogprobs) -> None:
        assert self.logprobs is not None
        self.logprobs.append(readable_logprobs(entry, self.tokenizer))
        self.cumulative_logprob += entry.logprobs[0]


@dataclass(slots=True, eq=False)
class RequestState:
    """One prompt with its samples."""

    processed: ProcessedRequest
    tokenizer: Tokenizer
    request_id: str = field(init=False)  # the user's name for it
    samples: list[CompletionState] = field(init=False)  # in seed order
    admitted: AdmittedRequest | None = None  # the first sample that ran
    first_token_time_s: float | None = None
    finished_time_s: float | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
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
                sample.sampling_params,
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

    def snapshot(self) -> RequestOutput:
        """Return the whole output so far as the user sees it."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.processed.prompt,
            prompt_token_ids=self.processed.prompt_token_ids,
            outputs=[sample.snapshot(index) for index, sample in enumerate(self.samples)],
            finished=self.is_finished,
            prompt_logprobs=self.prompt_logprobs,
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
