"""What a client wants to know beside the text."""

from dataclasses import dataclass
from typing import Self

from octavo.server.errors import bad_request
from octavo.server.openai.protocol import GenerationRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """The same for whole replies and streams."""

    includes_usage: bool  # a last chunk that says it; whole replies always do
    has_usage_everywhere: bool  # every chunk says it
    has_token_ids: bool
    names_tokens_by_id: bool

    @classmethod
    def of(cls, request: GenerationRequest) -> Self:
        """Read them off a request. Raises ApiError, 400: options of a stream without a stream."""
        options = request.stream_options
        if options is not None and not request.stream:
            raise bad_request("'stream_options' needs 'stream': true.", "stream_options")
        continuous = options is not None and bool(options.continuous_usage_stats)
        return cls(
            includes_usage=options is not None and bool(options.include_usage),
            has_usage_everywhere=continuous and options is not None and bool(options.include_usage),
            has_token_ids=bool(request.return_token_ids),
            names_tokens_by_id=bool(request.return_tokens_as_token_ids),
        )

    @property
    def is_plain(self) -> bool:
        """True when chunks carry text and nothing else."""
        return not (self.has_usage_everywhere or self.has_token_ids)
