"""`ResponsesService`: OpenAI's Responses API on top of chats. It generates nothing of its own."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from octavo.server.http.errors import ApiError, bad_request
from octavo.server.openai.birth import Birth
from octavo.server.openai.params import Warn
from octavo.server.openai.service import OpenAICompatibleService
from octavo.server.openai.translation import Translation
from octavo.server.responses.protocol import InputTokens, Response, ResponsesRequest
from octavo.server.responses.store import ResponseStore, not_found_before, with_ids
from octavo.server.responses.stream import ResponseStream
from octavo.server.responses.translate import ResponsesChat, input_items, translated

_REFERENCE = "item_reference"


class ResponsesService:
    """For requests of one owner; its methods are as those of `OpenAICompatibleService`."""

    def __init__(self, chats: OpenAICompatibleService, store: ResponseStore | None = None, owner: str = "") -> None:
        self._chats, self._owner = chats, owner
        self._store = None if store is None or not store.keeps_any else store

    async def begin_response(
        self, request: ResponsesRequest, warn: Warn, is_large: bool, birth: Birth
    ) -> ResponseStream:
        """Prepare an answer, which has not started."""
        keeps = self._store is not None and request.store is not False
        if request.background and not keeps:
            raise bad_request("background: needs 'store', and a server that keeps responses", "background")
        translation = await self._translated(request, warn)
        translation.chat.is_kept = keeps
        try:
            stream = await self._chats.begin_answer(ResponseStream, translation.chat, warn, is_large, birth)
        except ApiError as error:
            raise translation.named(error) from error
        if keeps:
            stream.keep = partial(self.keep, request)
        return stream

    async def input_tokens(self, request: ResponsesRequest, warn: Warn, is_large: bool) -> InputTokens:
        """Count the tokens of the prompt that a request becomes; it need not fit the context."""
        translation = await self._translated(request, warn)
        return InputTokens(input_tokens=await translation.count_tokens(self._chats, warn, is_large))

    async def keep(self, request: ResponsesRequest, response: Response) -> None:
        """Keep what has become of a request."""
        assert self._store is not None
        items = [item for _, item in input_items(request)]
        await self._store.put(self._owner, response, with_ids(items, response.id.partition("_")[2]))

    async def _translated(self, request: ResponsesRequest, warn: Warn) -> Translation[ResponsesChat]:
        earlier: Sequence[Mapping[str, Any]] = ()
        if request.previous_response_id is not None:
            if self._store is None:
                raise not_found_before(request.previous_response_id)
            earlier = await self._store.history(self._owner, request.previous_response_id)
        if isinstance(request.input, list) and any(item.get("type") == _REFERENCE for item in request.input):
            items = [await self._referred(item, index) for index, item in enumerate(request.input)]
            request = msgspec.structs.replace(request, input=items)
        front = self._chats.front
        template, takes_images = front.tokenizer.chat_template, front.inputs.takes_images
        return translated(request, earlier, warn, template=template, takes_images=takes_images)

    async def _referred(self, item: dict[str, Any], index: int) -> dict[str, Any]:
        """Return the item that another one refers to. Raises ApiError, 400: it is not kept."""
        if item.get("type") != _REFERENCE:
            return item
        found = None
        if self._store is not None and isinstance(item.get("id"), str):
            found = await self._store.item(self._owner, item["id"])
        if found is None:
            param = f"input[{index}].id"
            raise bad_request(f"Item with id {str(item.get('id'))[:100]!r} not found.", param, "item_not_found")
        return dict(found)
