"""Files and batches on the wire, as OpenAI's clients know them. Times are seconds since 1970."""

from typing import Any, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from octavo.server.openai.replies import Usage
from octavo.server.openai.token_usage import InputTokensDetails, OutputTokensDetails

T = TypeVar("T")

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
UNFINISHED: frozenset[BatchStatus] = frozenset({"validating", "in_progress", "finalizing", "cancelling"})


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that a client has uploaded, or that a batch has written."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    """What is gone."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class ExpiresAfter(msgspec.Struct, frozen=True, kw_only=True):
    """When a file expires: so many seconds after its creation."""

    anchor: Literal["created_at"]
    seconds: int


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with a line of the input, counted from 1, or with all of it."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class LineErrors(msgspec.Struct, frozen=True, kw_only=True):
    """Why a batch has failed."""

    object: Literal["list"] = "list"
    data: list[LineError]


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of a batch: all, those with an answer, those with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all answers."""

    input_tokens: int = 0
    input_tokens_details: InputTokensDetails = InputTokensDetails()
    output_tokens: int = 0
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int = 0

    def plus(self, usage: Usage) -> "BatchUsage":
        """Return the sum with an answer's."""
        cached = self.input_tokens_details.cached_tokens + usage.prompt_tokens_details.cached_tokens
        reasoning = self.output_tokens_details.reasoning_tokens + usage.completion_tokens_details.reasoning_tokens
        return BatchUsage(
            input_tokens=self.input_tokens + usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=cached),
            output_tokens=self.output_tokens + usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=reasoning),
            total_tokens=self.total_tokens + usage.total_tokens,
        )


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch: a request for each line of its input file."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: LineErrors | None = None
    input_file_id: str
    completion_window: str
    status: BatchStatus = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    usage: BatchUsage = BatchUsage()
    metadata: dict[str, str] | None = None


class Page(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A part of a list; the next one begins after `last_id`."""

    object: Literal["list"] = "list"
    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool


class LineResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a line: what an HTTP request would have got."""

    status_code: int
    request_id: str
    body: Any


class LineFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a line has no answer."""

    code: str
    message: str


class LineResult(msgspec.Struct, frozen=True, kw_only=True):
    """A line of an output file or of an error file."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: LineFailure | None


class BatchLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of an input file. `body` is what the endpoint takes."""

    custom_id: str | UnsetType = UNSET
    method: str | UnsetType = UNSET
    url: str | UnsetType = UNSET
    body: msgspec.Raw | UnsetType = UNSET


UPLOAD_FORM = {
    "multipart/form-data": {
        "schema": {
            "type": "object",
            "required": ["file", "purpose"],
            "properties": {
                "file": {"type": "string", "format": "binary"},
                "purpose": {"type": "string", "enum": ["batch"]},
                "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                "expires_after[seconds]": {"type": "integer"},
            },
        }
    }
}
