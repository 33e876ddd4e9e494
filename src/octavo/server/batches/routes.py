"""The routes of files and batches, which a server with a state folder offers."""

from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.responses import FileResponse

from octavo.server.args import ServerArgs
from octavo.server.batches.protocol import UPLOAD_FORM, Batch, BatchRequest, Deleted, Page, StoredFile
from octavo.server.batches.service import BatchService
from octavo.server.http.errors import ApiError, bad_request
from octavo.server.http.exchange import CLIENT_LEFT, Exchange, json_response
from octavo.server.http.routing import ApiRoute, add_routes
from octavo.server.http.upload import receive_upload
from octavo.server.openai.protocol import read_request

_MAX_LISTED_FILES = 10_000
_MAX_LISTED_BATCHES = 100
_LONGEST_FORM = 2**20  # bytes of a form around its file
_EXAMPLES = {"chats": {"input_file_id": "file-...", "endpoint": "/v1/chat/completions", "completion_window": "24h"}}


class StoredRoutes:
    """Handlers of raw requests."""

    def __init__(self, service: BatchService, args: ServerArgs) -> None:
        self._service, self._files, self._args = service, service.files, args

    def add_to(self, app: FastAPI) -> None:
        file, batch = "/v1/files/{file_id}", "/v1/batches/{batch_id}"
        table = [
            ApiRoute("POST", "/v1/files", self.upload_file, UPLOAD_FORM, StoredFile),
            ApiRoute("GET", "/v1/files", self.list_files, reply=Page[StoredFile]),
            ApiRoute("GET", file, self.get_file, reply=StoredFile),
            ApiRoute("GET", f"{file}/content", self.file_content),
            ApiRoute("DELETE", file, self.delete_file, reply=Deleted),
            ApiRoute("POST", "/v1/batches", self.create_batch, BatchRequest, Batch, examples=_EXAMPLES),
            ApiRoute("GET", "/v1/batches", self.list_batches, reply=Page[Batch]),
            ApiRoute("GET", batch, self.get_batch, reply=Batch),
            ApiRoute("POST", f"{batch}/cancel", self.cancel_batch, reply=Batch),
        ]
        add_routes(app, table)

    async def upload_file(self, request: Request) -> Response:
        """Upload a file for batches: a form with `file`, `purpose` (`batch`), and perhaps `expires_after`."""
        headers, part = request.headers, self._files.new_part()
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._args.max_file_bytes + _LONGEST_FORM:
            message = f"The file is larger than {self._args.max_file_bytes} bytes (the server's --max-file-bytes)."
            raise ApiError(413, message, param="file", code="file_too_large")
        try:
            content_type = headers.get("content-type", "").encode("latin-1")
            upload = await receive_upload(request.receive, content_type, part, self._args.max_file_bytes)
            if upload is None:
                return Response(status_code=CLIENT_LEFT)
            return json_response(await self._files.add_upload(owner_of(request), upload, part))
        finally:
            part.unlink(missing_ok=True)

    async def list_files(self, request: Request) -> Response:
        """List files, the newest first. Parameters: `after`, `limit`, `order` (`asc`, `desc`), `purpose`."""
        query = request.query_params
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise bad_request(f"order={order[:100]!r}: 'asc' or 'desc'.", "order")
        page = await self._files.page(
            owner_of(request),
            after=query.get("after"),
            limit=limit_of(request, _MAX_LISTED_FILES, _MAX_LISTED_FILES),
            ascending=order == "asc",
            purpose=query.get("purpose"),
        )
        return json_response(page)

    async def get_file(self, request: Request, file_id: str) -> Response:
        """What is known of a file."""
        return json_response(await self._files.get(owner_of(request), file_id))

    async def file_content(self, request: Request, file_id: str) -> Response:
        """The content of a file."""
        file = await self._files.get(owner_of(request), file_id)
        return FileResponse(self._files.path(file.id), media_type="application/octet-stream", filename=file.filename)

    async def delete_file(self, request: Request, file_id: str) -> Response:
        """Delete a file, unless a batch that has not ended reads it."""
        await self._files.delete(owner_of(request), file_id)
        return json_response(Deleted(id=file_id))

    async def create_batch(self, request: Request) -> Response:
        """Accept a batch: an uploaded file whose lines become requests to one endpoint, of the lowest priority."""
        exchange = Exchange.in_scope(request.scope)
        wire, warnings = read_request(exchange.body, BatchRequest)
        exchange.warnings += warnings
        return json_response(await self._service.create(exchange.owner, wire))

    async def list_batches(self, request: Request) -> Response:
        """List batches, the newest first. Parameters: `after`, `limit`."""
        limit, after = limit_of(request, 20, _MAX_LISTED_BATCHES), request.query_params.get("after")
        return json_response(await self._service.batches.page(owner_of(request), after=after, limit=limit))

    async def get_batch(self, request: Request, batch_id: str) -> Response:
        """How far a batch is."""
        return json_response(await self._service.batches.get(owner_of(request), batch_id))

    async def cancel_batch(self, request: Request, batch_id: str) -> Response:
        """Cancel a batch. Answers that are there go into its output; lines in flight are aborted."""
        return json_response(await self._service.cancel(owner_of(request), batch_id))


def owner_of(request: Request) -> str:
    return Exchange.in_scope(request.scope).owner


def limit_of(request: Request, default: int, most: int) -> int:
    """Return the query's `limit`. Raises ApiError, 400."""
    text: Any = request.query_params.get("limit")
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= most):
        raise bad_request(f"limit={text[:100]!r}: an integer between 1 and {most}.", "limit")
    return int(text)
