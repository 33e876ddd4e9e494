"""What translations of other APIs to chats share: messages and their places, errors in their words."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Self, TypeVar

from octavo.server.http.errors import ApiError, bad_request
from octavo.server.openai.chat_prompt import is_media, parts_of
from octavo.server.openai.params import Warn
from octavo.server.openai.protocol import ChatCompletionRequest, ChatMessage, ContentPart, TokenizeRequest, ToolCall
from octavo.server.openai.service import OpenAICompatibleService
from octavo.tokenizer.chat_template import ChatTemplate

ChatT = TypeVar("ChatT", bound=ChatCompletionRequest)

BETWEEN = "\n\n"  # texts of separate blocks
_PLACE = re.compile(r"messages\[\d+\](?:\.content\[\d+\](?:\.image_url)?)?|tools\[\d+\]")
_UNSEEN = "[an image, which this model cannot see]"
_SEEN = "[the image is shown after the results]"

Placed = tuple[str, ContentPart]  # a part of a message, and its path in the request


@dataclass(frozen=True, slots=True)
class Translated:
    """A message of a chat, with the path of each part of its content in the request."""

    chat: ChatMessage
    paths: list[str] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class Conversation:
    """The messages of a chat, and where they come from in the request.

    A later system message becomes what the user says where the chat template has no place for it. Were it merged into
    the first one, as in a chat, all that is cached of the conversation would be lost each time that an agent adds one.
    """

    takes_late_system: bool
    messages: list[ChatMessage] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)  # paths in the request by paths in the chat
    has_moved: bool = False  # a system message to the user's
    _ends_moved: bool = False  # the last message does: what the user says next belongs to it, as roles alternate
    _last: list[Placed] = field(default_factory=list)  # the parts of the last message

    @classmethod
    def of(cls, template: ChatTemplate | None) -> Self:
        """Return one without messages, for a chat template."""
        return cls(takes_late_system=template is None or template.takes_late_system)

    def add(self, message: Translated, path: str) -> None:
        role = message.chat.role
        before = self.messages[-1].role if self.messages else None
        is_moved = role == "system" and before not in (None, "system") and not self.takes_late_system
        parts = list(zip(message.paths, parts_of(message.chat), strict=True))
        if isinstance(text := message.chat.content, str):
            parts = [(path, ContentPart(type="text", text=text))]
        if role == before == "system" and not self.takes_late_system:
            parts = self._last + parts
            text = BETWEEN.join(part.text or "" for _, part in parts)
            message, path = Translated(ChatMessage(role="system", content=text)), self._drop_last()
        elif before == "user" and (is_moved or (role == "user" and self._ends_moved)):
            parts = self._last + parts
            message, path = said_by_user(parts), self._drop_last()
        elif is_moved:
            message = said_by_user(parts)
        self._last, self._ends_moved = parts, is_moved
        self.has_moved |= is_moved
        place = f"messages[{len(self.messages)}]"
        self.places[place] = path
        for at, part in enumerate(parts_of(message.chat)):
            self.places[f"{place}.content[{at}]"] = message.paths[at]
            if is_media(part):
                self.places[f"{place}.content[{at}].image_url"] = message.paths[at]
        self.messages.append(message.chat)

    def _drop_last(self) -> str:
        """Remove the last message, which is to be added again; return its path."""
        self.messages.pop()
        return self.places[f"messages[{len(self.messages)}]"]

    def warn_of_moves(self, warn: Warn) -> None:
        if self.has_moved:
            warn("later system messages are shown as the user's: the model's chat template has no place for them")


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation(Generic[ChatT]):
    """A chat, and where its parts come from, for errors that are found in it later."""

    chat: ChatT
    places: Mapping[str, str]
    names: Sequence[tuple[re.Pattern[str], str]]  # of a chat's fields, where a request calls them otherwise

    def named(self, error: ApiError) -> ApiError:
        """Return an error of the chat in the words of the request."""
        return error.in_words(self._words)

    async def count_tokens(self, chats: OpenAICompatibleService, warn: Warn, is_large: bool) -> int:
        """Count the tokens of the prompt that the chat becomes; it need not fit the context."""
        names = TokenizeRequest.__struct_fields__
        shared = {name: getattr(self.chat, name) for name in names if hasattr(self.chat, name)}
        try:
            return (await chats.tokenize(TokenizeRequest(**shared), warn, is_large)).count
        except ApiError as error:
            raise self.named(error) from error

    def _words(self, text: str) -> str:
        for name, own in self.names:
            text = name.sub(own, text)
        return _PLACE.sub(lambda found: self.places.get(found[0], found[0]), text)


@dataclass(frozen=True, slots=True)
class Result:
    """What a tool has returned: its text, and the images that are shown after the last result."""

    text: str
    images: list[Placed]

    @classmethod
    def of(cls, parts: Iterable[Placed], warn: Warn, *, takes_images: bool) -> "Result":
        """Return a result: chat templates show images in messages of users only."""
        parts = list(parts)
        images = [(path, part) for path, part in parts if is_media(part)]
        if images and not takes_images:
            warn("images in results of tools are left out: the model takes text only")
        mark = _SEEN if takes_images else _UNSEEN
        text = BETWEEN.join(mark if is_media(part) else part.text or "" for _, part in parts)
        return cls(text, images if takes_images else [])

    def marked_failed(self, mark: str) -> "Result":
        """Return a result that says that it is an error, if it does not say so itself."""
        return self if self.text.lower().startswith("error") else replace(self, text=mark + self.text)


def said_by_user(parts: Sequence[Placed]) -> Translated:
    """Return what a user says: text where there are no images, so that texts do not run into one another."""
    if any(is_media(part) for _, part in parts):
        content: str | list[ContentPart] = [part for _, part in parts]
        return Translated(ChatMessage(role="user", content=content), [path for path, _ in parts])
    return Translated(ChatMessage(role="user", content=BETWEEN.join(part.text or "" for _, part in parts)))


def said_by_assistant(texts: Sequence[str], thought: str, calls: list[ToolCall]) -> ChatMessage:
    """Return an earlier answer. Its thought goes to the template as the field that it reads."""
    content = "".join(texts)
    return ChatMessage(
        role="assistant",
        content=None if calls and not content else content,
        reasoning_content=thought or None,
        tool_calls=calls or None,
    )


def required(value: str | None, path: str) -> str:
    """Return a text. Raises ApiError, 400: it is not there."""
    if value is None:
        raise missing(path)
    return value


def missing(path: str) -> ApiError:
    return bad_request(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")


def unsupported(kind: str, path: str, known: str) -> ApiError:
    return bad_request(f"{path}={kind[:60]!r}: this server takes {known}", path, "unsupported_content")
