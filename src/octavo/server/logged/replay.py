"""Computes a logged request again, by the code that answers HTTP, and compares the answers."""

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from octavo.server.anthropic.protocol import MessagesRequest
from octavo.server.anthropic.service import MessagesService
from octavo.server.http.errors import MESSAGES, RESPONSES, ApiError, as_api_error
from octavo.server.kept.responses import Reply
from octavo.server.logged.answer_diff import (
    Difference,
    TokenDifference,
    first_difference,
    first_token_difference,
    uncompared_differences,
)
from octavo.server.logged.requests import LoggedRequest
from octavo.server.openai.embeddings import Embeddings, EmbeddingsRequest
from octavo.server.openai.params import LARGE_BODY
from octavo.server.openai.protocol import read_request
from octavo.server.openai.service import ENDPOINTS, OpenAICompatibleService
from octavo.server.responses.protocol import ResponsesRequest
from octavo.server.responses.service import ResponsesService

Verdict = Literal["equal", "differs", "cannot"]


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """What a request has become this time."""

    status: int = 200
    error: str | None = None
    code: str | None = None  # of the error
    was_refused: bool = False  # before anything was computed; the answer is the error's body
    answer: bytes = b""
    token_ids: list[list[int]] = []


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """How two answers compare, in words that fit behind the request's name."""

    verdict: Verdict
    text: str
    difference: Difference | None = None
    token_difference: TokenDifference | None = None


async def replay(service: OpenAICompatibleService, logged: LoggedRequest) -> Replayed:
    """Compute a logged request with the seeds, ids and time that it had. Errors are in the result."""
    facts, body = logged.facts, logged.contents.body
    if (found := _reader(service, facts.path)) is None:
        return Replayed(status=404, error=f"This version has no {facts.path}.", code="unknown_url", was_refused=True)
    try:
        kind, begin = found
        wire, _ = read_request(body, kind)
        births = () if isinstance(wire, EmbeddingsRequest) else (facts.birth,)
        reply: Reply | Embeddings = await begin(wire, _ignore, len(body) > LARGE_BODY, *births)
    except ApiError as error:
        return Replayed(
            status=error.status,
            error=error.detail.message,
            code=error.detail.code,
            was_refused=True,
            answer=error.body,
        )
    if isinstance(reply, Embeddings):
        return Replayed(answer=msgspec.json.encode(reply))
    parts: list[bytes] = []
    try:
        if facts.is_stream:
            await _stream(reply, parts)
        else:
            parts.append(msgspec.json.encode(await reply.whole()))
    except Exception as error:  # noqa: BLE001 - the caller shows it
        api_error = as_api_error(error)
        status, text = api_error.status, api_error.detail.message
        return Replayed(status=status, error=text, answer=b"".join(parts), token_ids=reply.token_ids)
    return Replayed(answer=b"".join(parts), token_ids=reply.token_ids)


def _reader(service: OpenAICompatibleService, path: str) -> tuple[type[Any], Callable[..., Any]] | None:
    """Return the type of a route's requests, and what prepares their answers; None: there is no such route."""
    if path == MESSAGES:
        return MessagesRequest, MessagesService(service).begin_message
    if path == RESPONSES:
        return ResponsesRequest, ResponsesService(service).begin_response
    endpoint = ENDPOINTS.get(path)
    return None if endpoint is None else (endpoint.wire, getattr(service, endpoint.begin))


def _ignore(warning: str) -> None:
    """The client was told."""


async def _stream(reply: Reply, parts: list[bytes]) -> None:
    """Collect the frames of a stream, an event per token, as they were logged."""
    reply.is_by_token, news = True, asyncio.Event()
    try:
        reply.start(news.set)
        while True:
            news.clear()
            parts.append(reply.take())
            if reply.is_over:
                return
            await news.wait()
    finally:
        reply.close()


def compare(logged: LoggedRequest, now: Replayed) -> Comparison:
    """Compare a logged answer with that of this time. One that was cut short is compared as far as it went."""
    facts, contents = logged.facts, logged.contents
    if now.was_refused and now.code in ("model_not_found", "unknown_url") and facts.status != now.status:
        return Comparison(verdict="cannot", text=f"cannot be computed here: {now.error}")
    was_refused = facts.status != 200 and not facts.reply_id
    if was_refused != now.was_refused or (facts.status == 200 and now.status != 200):
        ends = (
            f"{status} {error or ''}".strip()
            for status, error in ((facts.status, facts.error), (now.status, now.error))
        )
        difference = Difference(where="status", logged=next(ends), replayed=next(ends))
        return Comparison(verdict="differs", text="differs", difference=difference)
    is_partial = facts.status != 200 and not was_refused
    tokens = first_token_difference(contents.token_ids, now.token_ids, is_partial=is_partial)
    found = None
    if contents.answer or not is_partial:
        is_stream = facts.is_stream and not was_refused
        found = first_difference(contents.answer, now.answer, is_stream=is_stream, is_partial=is_partial)
    if found is not None or tokens is not None:
        return Comparison(verdict="differs", text="differs", difference=found, token_difference=tokens)
    if is_partial:
        num_tokens = sum(map(len, contents.token_ids))
        end = "ends well" if now.status == 200 else f"ends with {now.status} {now.error}"
        how = f"it was cut short ({facts.status} {facts.error}); this time it {end}"
        return Comparison(verdict="equal", text=f"equal as far as it went, {num_tokens} tokens: {how}")
    if contents.answer == now.answer:
        return Comparison(verdict="equal", text=f"equal, all {len(now.answer):,} bytes")
    rest = " and ".join(uncompared_differences(contents.answer, now.answer))
    return Comparison(verdict="equal", text=f"equal but for {rest}, {len(now.answer):,} bytes")
