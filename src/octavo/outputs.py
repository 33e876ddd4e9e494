"""What users get back: one `RequestOutput` per prompt, with one `CompletionOutput` per sample."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Logprob:
    """Log-probability (natural logarithm) of a token under the model, before penalties, bias, masks and temperature."""

    logprob: float
    rank: int  # 1 is the most likely token
    decoded_token: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One sample of one prompt.

    `finish_reason` is None while it runs, then `stop`, `length`, `abort` or `error`. `stop_reason` is the stop string
    or stop token id that ended it; None for the model's own EOS token. `logprobs[i]` belongs to `token_ids[i]`.
    """

    index: int
    text: str
    token_ids: list[int]
    seed: int  # the seed that reproduces this sample on its own
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None  # the reason, if finish_reason is `error`
    error_type: str | None = None  # its class in `octavo.errors`, if any; a `UserError` is the caller's mistake


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestMetrics:
    """Timestamps in seconds of the wall clock (`time.time`), and cache statistics."""

    arrival_time_s: float
    first_scheduled_time_s: float | None = None
    first_token_time_s: float | None = None
    finished_time_s: float | None = None
    num_cached_tokens: int = 0  # prompt tokens whose KV was found in the prefix cache
    num_preemptions: int = 0
    num_drafts: int = 0  # speculated tokens that were verified
    num_accepted_drafts: int = 0

    @property
    def time_to_first_token_s(self) -> float | None:
        return None if self.first_token_time_s is None else self.first_token_time_s - self.arrival_time_s


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """The output of one prompt: final if `finished`; while streaming, everything so far."""

    request_id: str
    prompt: str | None  # None when the prompt was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # [0] is None
    embedding: list[float] | None = None  # of `LLM.embed`; its only sample has no text

    @property
    def text(self) -> str:
        """The first sample's text."""
        return self.outputs[0].text

    @property
    def tokens_per_step(self) -> float | None:
        """Mean tokens that a sample got in a step in which it got any: more than 1 by drafts. None before the end."""
        num_tokens = sum(len(sample.token_ids) for sample in self.outputs)
        num_steps = num_tokens - self.metrics.num_accepted_drafts  # each has one token that is no draft
        return num_tokens / num_steps if self.finished and num_steps else None
