"""`LineAnswerer`: answers a line of a batch as the server answers an HTTP request, by the same code."""

import asyncio
import logging
import re
import uuid
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.errors import InvalidParameterError
from octavo.sampling_params import RequestPriority
from octavo.server.args import ServerArgs
from octavo.server.batches.protocol import BatchLine, LineFailure, LineResponse, LineResult
from octavo.server.http.errors import MODEL_FAILED, ApiError, ErrorReply, as_api_error
from octavo.server.http.exchange import check_timeout
from octavo.server.kept.responses import Reply
from octavo.server.openai.birth import Birth
from octavo.server.openai.embeddings import Embeddings, EmbeddingsRequest, EmbeddingsUsage
from octavo.server.openai.params import LARGE_BODY, num_samples
from octavo.server.openai.protocol import (
    GenerationRequest,
    read_request,
)
from octavo.server.openai.replies import CompletionTokensDetails, PromptTokensDetails, Usage
from octavo.server.openai.service import ENDPOINTS, OpenAICompatibleService

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"\d+")
_MAX_REMEMBERED = 1000  # warnings, each of which is logged once

WireRequest = GenerationRequest | EmbeddingsRequest
Serving = Callable[[str | None], AbstractAsyncContextManager[OpenAICompatibleService]]  # by the name of a model


class InterruptedLineError(Exception):
    """The engine has gone away under a line, which has no answer yet."""


@dataclass(frozen=True, slots=True)
class ReadLine:
    """A line that may be answered, or what is wrong with its body."""

    custom_id: str
    url: str
    wire: WireRequest | ApiError
    num_samples: int
    is_large: bool


class LineAnswerer:
    """Its requests have the lowest priority. `serving` raises ApiError, 503, while there is no engine."""

    def __init__(self, serving: Serving, args: ServerArgs) -> None:
        self._serving, self._args = serving, args
        self._known_warnings: set[str] = set()

    def read(self, line: BatchLine) -> ReadLine:
        """Decode the body as the endpoint does. A mistake in it becomes the line's answer."""
        custom_id, url, body = line.custom_id, line.url, line.body
        assert isinstance(custom_id, str)
        assert isinstance(url, str)
        assert isinstance(body, msgspec.Raw)
        data = bytes(body)
        try:
            wire, warnings = read_request(data, ENDPOINTS[url].wire)
            if wire.timeout is not None:
                check_timeout(wire.timeout)
        except (ApiError, InvalidParameterError) as error:
            return ReadLine(custom_id, url, as_api_error(error), 1, False)
        for text in warnings:
            self._warn(text)
        if wire.priority is None or wire.priority in list(RequestPriority):  # any other is refused, as over HTTP
            wire.priority = RequestPriority.BACKGROUND
        num = wire.num_inputs if isinstance(wire, EmbeddingsRequest) else num_samples(wire, self._args)
        return ReadLine(custom_id, url, wire, num, len(data) > LARGE_BODY)

    async def answer(self, line: ReadLine) -> LineResult:
        """Return the line's answer, or the error that a client would have got. Raises InterruptedLineError."""
        try:
            reply = await self._reply(line)
        except Exception as error:
            api_error = as_api_error(error)  # as of an HTTP request; logs bugs
            if api_error.status == 503 and api_error.detail.code != MODEL_FAILED:  # which tells clients to come back
                raise InterruptedLineError(api_error.detail.message) from error
            return self._result(line, api_error.status, ErrorReply(error=api_error.detail))
        return self._result(line, 200, reply)

    async def _reply(self, line: ReadLine) -> msgspec.Struct:
        if isinstance(line.wire, ApiError):
            raise line.wire
        async with self._serving(line.wire.model) as service:
            begin = getattr(service, ENDPOINTS[line.url].begin)
            births = () if isinstance(line.wire, EmbeddingsRequest) else (Birth(),)
            try:
                async with asyncio.timeout(line.wire.timeout) as limit:
                    reply: Embeddings | Reply = await begin(line.wire, self._warn, line.is_large, *births)
                    return reply if isinstance(reply, Embeddings) else await reply.whole()
            except TimeoutError:
                if not limit.expired():
                    raise
                message = f"The request reached its time limit of {line.wire.timeout:g} s."
                raise ApiError(408, message, kind="timeout_error", code="request_timeout") from None

    def _result(self, line: ReadLine, status: int, body: Any) -> LineResult:
        response = LineResponse(status_code=status, request_id=f"req_{uuid.uuid4().hex}", body=body)
        return LineResult(id=new_line_id(), custom_id=line.custom_id, response=response, error=None)

    def _warn(self, text: str) -> None:
        """Log what has no effect, once: the output has no place for it."""
        kind = _NUMBER.sub("0", text)
        if kind not in self._known_warnings and len(self._known_warnings) < _MAX_REMEMBERED:
            self._known_warnings.add(kind)
            logger.warning("%s (in a batch; logged once)", text)


def unanswered(custom_id: str, code: str, message: str) -> LineResult:
    """Return the result of a line that was not tried to its end."""
    failure = LineFailure(code=code, message=message)
    return LineResult(id=new_line_id(), custom_id=custom_id, response=None, error=failure)


def is_failed(result: LineResult) -> bool:
    return result.response is None or result.response.status_code != 200


def usage_of(result: LineResult) -> Usage | None:
    """Return the tokens of an answer; None if there is none."""
    usage = None if result.response is None else getattr(result.response.body, "usage", None)
    if isinstance(usage, EmbeddingsUsage):
        return Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=0,
            total_tokens=usage.total_tokens,
            prompt_tokens_details=PromptTokensDetails(),
            completion_tokens_details=CompletionTokensDetails(),
        )
    return usage if isinstance(usage, Usage) else None


def new_line_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"
