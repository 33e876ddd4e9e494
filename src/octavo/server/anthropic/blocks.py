"""The turns of a Messages conversation, made of blocks, as messages of a chat.

A `user` turn may hold results of tools: in a chat, each of these is a message of its own before what the user says.
Images among results follow the last of them, as chat templates show images in messages of users only.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from octavo.server.anthropic.protocol import Block, Source
from octavo.server.http.errors import bad_request
from octavo.server.openai.params import Warn
from octavo.server.openai.protocol import ChatMessage, ContentPart, FunctionCall, ImageUrl, ToolCall
from octavo.server.openai.translation import (
    BETWEEN,
    Placed,
    Result,
    Translated,
    missing,
    required,
    said_by_assistant,
    said_by_user,
    unsupported,
)

_BILLING = "x-anthropic-billing-header:"
_FAILED = "Error: "


@dataclass(slots=True)
class Turn:
    """Successive messages of one role, with the path of each block."""

    role: str
    path: str
    blocks: list[tuple[str, Block]] = field(default_factory=list)

    def add(self, content: str | list[Block], path: str) -> None:
        if isinstance(content, str):
            self.blocks.append((path, Block(type="text", text=content)))
        else:
            self.blocks += [(f"{path}[{index}]", block) for index, block in enumerate(content)]

    @property
    def is_blank(self) -> bool:
        """Whether it says nothing."""
        return not any(block.type != "text" or (block.text or "").strip() for _, block in self.blocks)


def system_text(system: str | list[Block] | None, *, keeps_billing_header: bool) -> str:
    """Return the system prompt.

    The line with which Claude Code's begins differs in every request, so with it no prefix is ever found again.
    """
    blocks = [Block(type="text", text=system)] if isinstance(system, str) else system or []
    texts = [_text(block, f"system[{index}]") for index, block in enumerate(blocks)]
    if not keeps_billing_header:
        texts = [text.partition("\n")[2] if text.startswith(_BILLING) else text for text in texts]
    return BETWEEN.join(text for text in texts if text)


def chat_messages(turn: Turn, warn: Warn, *, takes_images: bool) -> Iterator[Translated]:
    """Yield the messages of one turn. Raises ApiError, 400: names a block that it cannot have."""
    match turn.role:
        case "assistant":
            yield _answer(turn)
        case "system":
            texts = [_text(block, path) for path, block in turn.blocks]
            yield Translated(ChatMessage(role="system", content=BETWEEN.join(texts)))
        case _:
            yield from _user(turn, warn, takes_images=takes_images)


def _answer(turn: Turn) -> Translated:
    texts, thoughts = list[str](), list[str]()
    calls: list[ToolCall] = []
    for path, block in turn.blocks:
        match block.type:
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":  # in another provider's cipher
                continue
            case "tool_use":
                arguments = {} if block.input is None else block.input
                if not isinstance(arguments, dict):
                    raise bad_request(f"{path}.input: an object is expected", f"{path}.input", "invalid_type")
                function = FunctionCall(name=required(block.name, f"{path}.name"), arguments=arguments)
                calls.append(ToolCall(id=required(block.id, f"{path}.id"), type="function", function=function))
            case _:
                texts.append(_text(block, path))
    return Translated(said_by_assistant(texts, "".join(thoughts), calls))


def _user(turn: Turn, warn: Warn, *, takes_images: bool) -> Iterator[Translated]:
    if not turn.blocks:
        raise bad_request(f"{turn.path}.content must not be empty", f"{turn.path}.content")
    shown: list[Placed] = []  # images of results
    said: list[Placed] = []
    for path, block in turn.blocks:
        if block.type != "tool_result":
            said.append((path, _part(block, path)))
            continue
        result = Result.of(_result_parts(block, path), warn, takes_images=takes_images)
        if block.is_error:
            result = result.marked_failed(_FAILED)
        shown += result.images
        call_id = required(block.tool_use_id, f"{path}.tool_use_id")
        yield Translated(ChatMessage(role="tool", tool_call_id=call_id, content=result.text))
    if parts := shown + said:
        yield said_by_user(parts)


def _result_parts(block: Block, path: str) -> Iterator[Placed]:
    if isinstance(block.content, str):
        yield f"{path}.content", ContentPart(type="text", text=block.content)
        return
    for index, inner in enumerate(block.content or ()):
        at = f"{path}.content[{index}]"
        if inner.type == "tool_reference":  # the result of a search for tools
            yield at, ContentPart(type="text", text=required(inner.tool_name, f"{at}.tool_name"))
        else:
            yield at, _part(inner, at)


def _part(block: Block, path: str) -> ContentPart:
    if block.type == "image":
        source = block.source
        if not isinstance(source, Source):
            raise missing(f"{path}.source")
        return ContentPart(type="image_url", image_url=ImageUrl(url=_url(source, f"{path}.source")))
    return ContentPart(type="text", text=_text(block, path))


def _url(source: Source, path: str) -> str:
    match source.type:
        case "base64":  # the file says better than `media_type` what it is
            return "data:application/octet-stream;base64," + required(source.data, f"{path}.data")
        case "url":
            return required(source.url, f"{path}.url")
    raise unsupported(source.type, f"{path}.type", "base64 and url")


def _text(block: Block, path: str) -> str:
    """Return the text of a block that has nothing else."""
    match block.type:
        case "text":
            return required(block.text, f"{path}.text")
        case "document":
            return _document(block, path)
        case "search_result":
            parts = [block.title or "", block.source if isinstance(block.source, str) else ""]
            content = _inner_text(block.content, f"{path}.content")
            return "\n".join(part for part in (*parts, content) if part)
    raise unsupported(block.type, f"{path}.type", "text, image, document, search_result, tool_use and tool_result")


def _document(block: Block, path: str) -> str:
    source = block.source
    if not isinstance(source, Source):
        raise missing(f"{path}.source")
    if source.type == "text":
        content = required(source.data, f"{path}.source.data")
    elif source.type == "content":
        content = _inner_text(source.content, f"{path}.source.content")
    else:
        raise unsupported(source.type, f"{path}.source.type", "documents of the types text and content")
    return "\n".join(part for part in (block.title or "", block.context or "", content) if part)


def _inner_text(content: str | list[Block] | None, path: str) -> str:
    if isinstance(content, str):
        return content
    return BETWEEN.join(_text(block, f"{path}[{index}]") for index, block in enumerate(content or ()))
