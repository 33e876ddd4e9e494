"""Errors on the wire: every response other than 2xx is `{"error": {"message", "type", "param", "code"}}`.

Routes of other APIs have shapes of their own: `error_body`.

`ApiError` is raised anywhere below a route; `as_api_error` converts other exceptions. Client errors are always 4xx:
official clients retry a 5xx twice, so a 500 for a bad request would be executed three times.
"""

import logging
import re
from collections.abc import Callable, Mapping

import msgspec

from octavo.errors import EngineDeadError, EngineError, InvalidParameterError, PromptTooLongError, UserError

logger = logging.getLogger(__name__)

MESSAGES = "/v1/messages"  # Anthropic's route, and the beginning of its others
RESPONSES = "/v1/responses"
MODEL_FAILED = "model_failed"  # code of a 503: to come back may not help
DONE = b"data: [DONE]\n\n"  # the last frame of OpenAI's streams

# The `type` that OpenAI gives errors of a status.
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
# Those of Anthropic.
_ANTHROPIC_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
          413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}  # fmt: skip
_TOO_LONG = re.compile(r"maximum context length is (\d+) tokens.* you asked for (?:at least )?(\d+) tokens", re.DOTALL)
_MAX_SHOWN = 200  # characters of a client's value that an error quotes


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong. `param` is the dotted path of the field at fault, `code` is for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every response other than 2xx."""

    error: ErrorDetail


class ApiError(Exception):
    """A non-2xx response, ready to send."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.detail = ErrorDetail(
            message=message,
            type=kind or _TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error"),
            param=param,
            code=code,
        )

    def in_words(self, words: Callable[[str], str]) -> "ApiError":
        """Return the same error, with its message and path in other words."""
        detail, param = self.detail, self.detail.param and words(self.detail.param)
        return ApiError(
            self.status, words(detail.message), kind=detail.type, param=param, code=detail.code, headers=self.headers
        )

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(ErrorReply(error=self.detail))


class MessagesErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong."""

    type: str
    message: str


class MessagesError(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every response other than 2xx, and the data of the event `error`."""

    error: MessagesErrorDetail
    type: str = "error"


def messages_error(status: int, message: str) -> MessagesError:
    """Return the error of a response with this status.

    Claude Code shortens a conversation when it reads "prompt is too long: N tokens > M maximum", so a prompt beyond the
    context is refused in these words.
    """
    kind = _ANTHROPIC_TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    if (found := _TOO_LONG.search(message)) is not None:
        message = f"prompt is too long: {found[2]} tokens > {found[1]} maximum. {message}"
    return MessagesError(error=MessagesErrorDetail(type=kind, message=message))


# How other APIs write an error, by the beginning of their routes.
_SHAPES: Mapping[str, Callable[[ApiError], object]] = {
    "/api/v1/": lambda error: ErrorReply(error=error.detail),  # a wrong base URL of OpenAI's clients
    "/api/": lambda error: {"error": error.detail.message},  # Ollama's
    MESSAGES: lambda error: messages_error(error.status, error.detail.message),  # Anthropic's
    "/v1/systemone": lambda error: {"detail": [_as_problem(error, line) for line in error.detail.message.split("\n")]},
}


def _as_problem(error: ApiError, line: str) -> dict[str, object]:
    """Return one of the lines of an error as FastAPI writes what is wrong with a body."""
    where = line.partition(":")[0] if line.startswith("questions.") else error.detail.param or ""
    return {"loc": ["body", *filter(None, where.split("."))], "msg": line, "type": error.detail.code}


def error_body(error: ApiError, path: str) -> bytes:
    """Return the body of an error as the API that `path` belongs to writes it."""
    for beginning, shape in _SHAPES.items():
        if path.startswith(beginning):
            return msgspec.json.encode(shape(error))
    return error.body


def error_frames(error: ApiError, path: str) -> bytes:
    """Return the end of an event stream that fails after it has begun."""
    frame = b"data: " + error_body(error, path) + b"\n\n"
    if path.startswith(RESPONSES):
        event = {"type": "error", "code": error.detail.code, "message": error.detail.message, "param": None}
        return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"
    return b"event: error\n" + frame if path.startswith(MESSAGES) else frame + DONE


def bad_request(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str) -> ApiError:
    """Return a 503 (loading, draining, dead) that clients may retry."""
    return ApiError(503, message, code=code, headers={"Retry-After": "1"})


def as_api_error(error: BaseException, names: Mapping[str, str] | None = None) -> ApiError:
    """Convert an exception, `names`: of fields on the wire. Any but ours is a bug: logged, with no details sent."""
    if isinstance(error, ApiError):
        return error
    names = names or {}
    if isinstance(error, PromptTooLongError):
        text = f"{error.limit}. However, you asked for {error.value}. Please shorten the prompt."
        return bad_request(text, names.get(error.field, error.field), "context_length_exceeded")
    if isinstance(error, InvalidParameterError):
        param, shown = names.get(error.field, error.field), repr(error.value)
        shown = shown if len(shown) <= _MAX_SHOWN else shown[:_MAX_SHOWN] + "..."
        return bad_request(f"{param}={shown}: {error.limit}", param)
    if isinstance(error, UserError):
        return bad_request(str(error))
    if isinstance(error, EngineError):
        is_dead = isinstance(error, EngineDeadError)
        return unavailable(str(error), "engine_dead") if is_dead else ApiError(500, str(error), code="engine_error")
    logger.error("internal error in a request", exc_info=error)
    return ApiError(500, "Internal server error.", code="internal_error")
