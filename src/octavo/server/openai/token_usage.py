"""How many tokens an answer took, in the words that OpenAI's newer APIs have for it."""

from typing import Self

import msgspec

from octavo.server.openai.replies import Usage


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens by source."""

    cached_tokens: int = 0


class WrittenTokensDetails(InputTokensDetails, frozen=True, kw_only=True):
    """The server's cache keeps every prompt, at no price."""

    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens by purpose."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a response, or of decisions, which write none."""

    input_tokens: int
    input_tokens_details: WrittenTokensDetails
    output_tokens: int = 0
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> Self:
        """Return what a chat's usage says."""
        reasoning = usage.completion_tokens_details.reasoning_tokens
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=WrittenTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=reasoning),
            total_tokens=usage.total_tokens,
        )

    def count_tokens(self) -> tuple[int, int]:
        return self.input_tokens, self.output_tokens
