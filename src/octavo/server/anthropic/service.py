"""`MessagesService`: Anthropic's Messages API on top of chats. It generates nothing of its own."""

from octavo.server.anthropic.protocol import CountTokensRequest, MessagesRequest, TokenCount
from octavo.server.anthropic.stream import MessageStream
from octavo.server.anthropic.translate import Reader, translated
from octavo.server.http.errors import ApiError
from octavo.server.openai.birth import Birth
from octavo.server.openai.params import Warn
from octavo.server.openai.service import OpenAICompatibleService


class MessagesService:
    """Its methods are as those of `OpenAICompatibleService`."""

    def __init__(self, chats: OpenAICompatibleService) -> None:
        self._chats = chats
        self._reader = Reader(
            formats=chats.formats,
            takes_images=chats.front.inputs.takes_images,
            keeps_billing_header=chats.args.keep_billing_header,
        )

    async def begin_message(self, request: MessagesRequest, warn: Warn, is_large: bool, birth: Birth) -> MessageStream:
        """Prepare the answer to a conversation, which has not started."""
        translation = translated(request, self._reader, warn)
        try:
            return await self._chats.begin_answer(MessageStream, translation.chat, warn, is_large, birth)
        except ApiError as error:
            raise translation.named(error) from error

    async def count_tokens(self, request: CountTokensRequest, warn: Warn, is_large: bool) -> TokenCount:
        """Count the tokens of the prompt that a conversation becomes; it need not fit the context."""
        translation = translated(request, self._reader, warn)
        return TokenCount(input_tokens=await translation.count_tokens(self._chats, warn, is_large))
