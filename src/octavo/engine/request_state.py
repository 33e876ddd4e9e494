"""The frontend's state of a request until it finishes: text so far, logprobs, times."""

from collections.abc import Sequence

import msgspec

from octavo.contracts.engine import AdmittedRequest, FinishedRequest, TokenLogprobs
from octavo.engine.input_processor import ProcessedRequest
from octavo.engine.stop_finder import StopFinder
from octavo.engine.stop_strings import StopStringMatcher
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


class CompletionState:
    """One sample: its detokenizer, stop string matcher and output so far.

    `matcher` looks for the stop strings of `params` in all of the text, `finder` in a part of it; None: nobody does.
    """

    __slots__ = (
        "_detokenizer",
        "_finder",
        "_is_taken",
        "_matcher",
        "_min_tokens",
        "_num_taken",
        "_params",
        "_text",
        "_tokenizer",
        "cumulative_logprob",
        "error",
        "error_type",
        "finish_reason",
        "last_token_time_s",
        "logprobs",
        "request_id",
        "seed",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        params: SamplingParams,
        prompt_ids: list[int],
        tokenizer: Tokenizer,
        matcher: StopStringMatcher | None = None,
        finder: StopFinder | None = None,
    ) -> None:
        assert params.seed is not None
        self.request_id = request_id
        self.seed = params.seed
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None
        self.error_type: str | None = None
        self.last_token_time_s: float | None = None
        self._is_taken = False  # `take` has returned the final delta
        self._num_taken = 0  # tokens returned by `take`
        self._params = params
        self._text: list[str] = []
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=params.skip_special_tokens, prompt_token_ids=prompt_ids
        )
        self._matcher = matcher
        self._finder = finder

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
        self._flush()

    def push_stop_token(self, first_index: int, token_id: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Add the token that ended the sample: it counts, but its text is shown only on request."""
        if self._params.include_stop_str_in_output:
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
        may_stop, stop = len(self.token_ids) >= self._params.min_tokens, None
        if self._finder is not None:
            delta, stop = self._finder.push(delta) if may_stop else (self._finder.skip(delta), None)
        elif self._matcher is not None and may_stop:
            delta, stop = self._matcher.push(delta)
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
        if delta:
            self._text.append(delta)

    def _flush(self) -> None:
        """Show held-back text: an incomplete character or the beginning of a stop string."""
        self._show(self._detokenizer.flush())
        if self._matcher is not None:
            self._text.append(self._matcher.flush())
        if self._finder is not None and not isinstance(self.stop_reason, str):
            self._finish(self._finder)

    def _finish(self, finder: StopFinder) -> None:
        may_stop = self.finish_reason in ("stop", "length") and len(self.token_ids) >= self._params.min_tokens
        text, stop = finder.finish(is_cut=self.finish_reason == "length", may_stop=may_stop)
        self._text.append(text)
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop

    def _push_logprobs(self, entry: TokenLogprobs) -> None:
        assert self.logprobs is not None
        self.logprobs.append(readable_logprobs(entry, self._tokenizer))
        self.cumulative_logprob += entry.logprobs[0]


class RequestState:
    """One prompt with its samples."""

    __slots__ = ("_first_token_time_s", "_processed", "_tokenizer", "admitted", "arrival_time_s", "finished_time_s",
                 "num_accepted_drafts", "num_drafts", "num_preemptions", "prompt_logprobs", "request_id",
                 "samples")  # fmt: skip

    def __init__(self, processed: ProcessedRequest, tokenizer: Tokenizer) -> None:
        self.request_id = processed.request_id
        self._processed = processed
        self._tokenizer = tokenizer
        self.arrival_time_s = processed.samples[0].arrival_time_s
        self._first_token_time_s: float | None = None
        params = processed.params
        new_finder = processed.new_stop_finder
        searches_all = params.stop and new_finder is None
        matcher = StopStringMatcher(params.stop, params.include_stop_str_in_output) if searches_all else None
        self.samples = [
            CompletionState(
                sample.request_id,
                sample.sampling_params,
                processed.prompt_token_ids,
                tokenizer,
                None if matcher is None else matcher.for_another(),
                None if new_finder is None else new_finder(),
            )
            for sample in processed.samples
        ]
        self.admitted: AdmittedRequest | None = None  # the first sample that ran
        self.finished_time_s: float | None = None
        self.num_preemptions = self.num_drafts = self.num_accepted_drafts = 0
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None

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
    def num_output_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def prompt(self) -> str | None:
        return self._processed.prompt

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._processed.prompt_token_ids

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._processed.prompt_token_ids)

    @property
    def adapter_name(self) -> str | None:
        return None if self._processed.adapter is None else self._processed.adapter.name

    @property
    def num_images(self) -> int:
        """Images and videos in the prompt."""
        extra = self._processed.samples[0].extra_inputs
        return 0 if extra is None else len(extra.vision) + len(extra.embedding_spans)

    @property
    def max_tokens(self) -> int | None:
        return self._processed.params.max_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return self.admitted.num_cached_tokens if self.admitted else 0

    def record_token(self, now_s: float) -> bool:
        """Record a step with a token; return whether there was one before."""
        if self._first_token_time_s is not None:
            return True
        self._first_token_time_s = now_s
        return False

    def record_report(self, report: FinishedRequest) -> None:
        """Add what the core counted for a sample that has ended."""
        self.num_preemptions += report.num_preemptions
        self.num_drafts += report.num_drafts
        self.num_accepted_drafts += report.num_accepted_drafts

    def record_prompt_logprobs(self, entries: Sequence[TokenLogprobs | None]) -> None:
        self.prompt_logprobs = [
            None if entry is None else readable_logprobs(entry, self._tokenizer) for entry in entries
        ]

    def snapshot(self) -> RequestOutput:
        """Return the whole output so far as the user sees it."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._processed.prompt,
            prompt_token_ids=self._processed.prompt_token_ids,
            outputs=[sample.snapshot(index) for index, sample in enumerate(self.samples)],
            finished=self.is_finished,
            prompt_logprobs=self.prompt_logprobs,
            metrics=self.times(),
        )

    def times(self) -> RequestMetrics:
        """Return the times of events so far."""
        return RequestMetrics(
            arrival_time_s=self.arrival_time_s,
            first_scheduled_time_s=self.admitted.scheduled_time_s if self.admitted else None,
            first_token_time_s=self._first_token_time_s,
            finished_time_s=self.finished_time_s,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            num_drafts=self.num_drafts,
            num_accepted_drafts=self.num_accepted_drafts,
        )


def readable_logprobs(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """Return one position's logprobs as the user sees them: the chosen token first, then the most likely."""
    table = {
        token_id: Logprob(logprob=logprob, rank=rank, decoded_token=tokenizer.token_text(token_id))
        for rank, (token_id, logprob) in enumerate(zip(entry.token_ids[1:], entry.logprobs[1:], strict=True), start=1)
    }
    first = entry.token_ids[0]
    standing = Logprob(logprob=entry.logprobs[0], rank=entry.rank, decoded_token=tokenizer.token_text(first))
    return {first: standing} | {token_id: logprob for token_id, logprob in table.items() if token_id != first}
