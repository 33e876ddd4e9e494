"""Errors as Anthropic's clients read them: `{"type": "error", "error": {"type", "message"}}`.

Claude Code shortens a conversation when it reads "prompt is too long: N tokens > M maximum", so a prompt beyond the
context is refused in these words.
"""

import re

import msgspec

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
          413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}  # fmt: skip
_TOO_LONG = re.compile(r"maximum context length is (\d+) tokens.* you asked for (?:at least )?(\d+) tokens", re.DOTALL)


class MessagesErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong."""

    type: str
    message: str


class MessagesError(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every response other than 2xx, and the data of the event `error`."""

    error: MessagesErrorDetail
    type: str = "error"


def messages_error(status: int, message: str) -> MessagesError:
    """Return the error of a response with this status."""
    kind = _TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    if (found := _TOO_LONG.search(message)) is not None:
        message = f"prompt is too long: {found[2]} tokens > {found[1]} maximum. {message}"
    return MessagesError(error=MessagesErrorDetail(type=kind, message=message))
