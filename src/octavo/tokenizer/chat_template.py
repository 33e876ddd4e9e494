"""`ChatTemplate`: renders a conversation to a prompt with the checkpoint's Jinja template.

Templates are untrusted code and run in a sandbox (`template_sandbox.py`). The dialect is that of Hugging Face
checkpoints (https://huggingface.co/docs/transformers/chat_templating): trimmed blocks, `break` and `continue`,
`raise_exception`, `strftime_now`, `tojson` without HTML escapes, and `{% generation %}` marks, which only matter for
training.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser

from octavo.errors import InvalidParameterError
from octavo.tokenizer.message_forms import MessageForms
from octavo.tokenizer.template_sandbox import LimitedEnvironment, render_limited

logger = logging.getLogger(__name__)

_MARKS = ({"type": "image"}, {"type": "video"})  # what `octavo.multimodal` puts in place of images
SYSTEM_ROLES = ("system", "developer")  # the newer name; templates without it get the older one
_NEEDS_CONTENT = ("user", *SYSTEM_ROLES)
_PARAMETERS = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
_TRIAL_TOOLS = ({"type": "function", "function": {"name": "f", "description": "x", "parameters": _PARAMETERS}},)
_PROBE = "\N{REFERENCE MARK}a later instruction\N{REFERENCE MARK}"
# The trailing space shows whether the template trims messages: if it is gone, the text before the mark is trimmed, too.
_CUT_MARK = "\N{REFERENCE MARK}cut here\N{REFERENCE MARK} "


# What a template, which is a program, may raise for messages that it does not expect.
_TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    MemoryError,
)


class _RefusedError(TemplateError):
    """The template rejects the messages, in its author's words."""


class ChatTemplate:
    """One checkpoint's template, compiled on first use."""

    def __init__(
        self, source: str, *, special_tokens: Mapping[str, str] | None = None, tool_use_source: str | None = None
    ) -> None:
        self.source = source
        self.tool_use_source = tool_use_source
        self._special_tokens = dict(special_tokens or {})
        self._forms = MessageForms(self._write_trial)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        continue_final_message: bool = False,
        **variables: object,
    ) -> str:
        """Return the prompt. `variables` are further inputs of the template, such as `enable_thinking`.

        With `continue_final_message` the prompt ends within the last message, for the model to continue it;
        `add_generation_prompt` is then off.

        Raises:
            InvalidParameterError: malformed messages, or messages that the template rejects.
        """
        plain = plain_messages(messages)
        roles = [message["role"] for message in plain]
        if "developer" not in self.source:
            plain = [message | {"role": "system"} if message["role"] == "developer" else message for message in plain]
        if self.must_merge(plain):
            plain = merge_system_messages(plain)
        if continue_final_message:
            plain[-1] = _marked(plain[-1])
            add_generation_prompt = False
        context = {
            **self._special_tokens,
            "messages": self._as_read(self._forms.apply(plain, with_tools=bool(tools))),
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        try:
            text = self._render(context)
        except _RefusedError as error:
            raise InvalidParameterError("messages", roles, f"rejected by the chat template: {error}") from error
        except _TEMPLATE_ERRORS as error:
            logger.info("the chat template failed: %s: %s", type(error).__name__, error)
            raise InvalidParameterError("messages", roles, "the chat template cannot render them") from error
        return _cut_at_mark(text) if continue_final_message else text

    def must_merge(self, messages: Sequence[Mapping[str, object]]) -> bool:
        """Whether `render` merges system messages into the first one: the template has no place for later ones."""
        is_late = any(message.get("role") in SYSTEM_ROLES for message in messages[1:])
        return is_late and not self._takes_late_system

    @cached_property
    def _takes_late_system(self) -> bool:
        """Whether the template writes a system message that is not the first; many reject or drop it."""
        roles = ("user", "assistant", "system", "user")
        messages = [{"role": role, "content": _PROBE if role == "system" else "x"} for role in roles]
        takes = self._writes_probe(self._as_read(messages))
        if not takes:
            logger.warning(
                "the chat template has no place for system messages after the first: they are merged into it"
            )
        return takes

    def _as_read(self, messages: Sequence[Mapping[str, object]]) -> Sequence[Mapping[str, object]]:
        """Return messages with text in the form that the template reads."""
        if not self._reads_parts_only:
            return messages
        return [
            {**message, "content": [{"type": "text", "text": content}]}
            if isinstance(content := message.get("content"), str)
            else message
            for message in messages
        ]

    @cached_property
    def _reads_parts_only(self) -> bool:
        """Whether the template writes the text of a list of parts, and drops that of a string, as LLaVA's do."""
        if "type" not in self.source:
            return False
        parts = [{"type": "text", "text": _PROBE}]
        by_string, by_parts = (self._writes_probe([{"role": "user", "content": each}]) for each in (_PROBE, parts))
        return by_parts and not by_string

    def _writes_probe(self, messages: Sequence[Mapping[str, object]]) -> bool:
        return _PROBE in (self._write(messages, tools=None) or "")

    def _write_trial(self, messages: Sequence[Mapping[str, object]], with_tools: bool) -> str | None:
        return self._write(self._as_read(messages), tools=_TRIAL_TOOLS if with_tools else None)

    def _write(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] | None
    ) -> str | None:
        """Return what the template writes for a trial; None if it fails."""
        context = {**self._special_tokens, "messages": messages, "tools": tools, "add_generation_prompt": True}
        try:
            return self._render(context)
        except _TEMPLATE_ERRORS:
            return None

    def reads(self, variable: str, *, with_tools: bool = False) -> bool:
        """Whether the template for requests with or without tools mentions a variable at all."""
        return variable in (self._tool_use_names if with_tools else self._names)

    def check(self) -> None:
        """Compile the template now rather than on first use.

        Raises:
            InvalidParameterError: it is not a Jinja template.
        """
        try:
            assert self._template is not None
        except TemplateError as error:
            raise InvalidParameterError("chat_template", self.source[:100], f"not a Jinja template: {error}") from error

    def _render(self, context: Mapping[str, Any]) -> str:
        template = self._tool_use_template if context["tools"] else self._template
        return render_limited(template, dict(context))

    @cached_property
    def _template(self) -> Template:
        return _environment().from_string(self.source)

    @cached_property
    def _tool_use_template(self) -> Template:
        return self._template if self.tool_use_source is None else _environment().from_string(self.tool_use_source)

    @cached_property
    def _names(self) -> frozenset[str]:
        return _names_in(self.source)

    @cached_property
    def _tool_use_names(self) -> frozenset[str]:
        return self._names if self.tool_use_source is None else _names_in(self.tool_use_source)


def _names_in(source: str) -> frozenset[str]:
    return frozenset(node.name for node in _environment().parse(source).find_all(nodes.Name))


def plain_messages(messages: object) -> list[dict[str, object]]:
    """Check a conversation and normalize it for templates: text as one string, no nulls.

    Raises:
        InvalidParameterError: names the message and the problem.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise InvalidParameterError("messages", messages, "a list of at least one message")
    return [_plain_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def merge_system_messages(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return the conversation with all system messages as one, the first message."""
    texts = [str(message["content"]) for message in messages if message["role"] in SYSTEM_ROLES]
    others = [dict(message) for message in messages if message["role"] not in SYSTEM_ROLES]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _plain_message(name: str, message: object) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise InvalidParameterError(name, message, 'an object such as {"role": "user", "content": "Hello"}')
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidParameterError(f"{name}.role", role, "a non-empty string")
    content = _plain_content(f"{name}.content", message.get("content"))
    if content is None and role in _NEEDS_CONTENT:
        raise InvalidParameterError(f"{name}.content", None, f"a message of the role {role!r} needs content")
    plain = dict(message) | {"content": content}
    return {key: value for key, value in plain.items() if value is not None}


def _plain_content(name: str, content: object) -> str | list[object] | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParameterError(name, content, "a string, a list of text parts, or null")
    if any(part in _MARKS for part in content):  # templates of models that take images read lists of parts
        texts = [(index, part) for index, part in enumerate(content) if part not in _MARKS]
        plain = {index: {"type": "text", "text": _part_text(f"{name}[{index}]", part)} for index, part in texts}
        return [plain.get(index, part) for index, part in enumerate(content)]
    return "".join(_part_text(f"{name}[{index}]", part) for index, part in enumerate(content))


def _part_text(name: str, part: object) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": kind} if kind != "text":  # the rest of it may be a whole file
            limit = '"text" is expected, or "image", "image_url", "video" or "video_url" for vision-language models'
            raise InvalidParameterError(name, {"type": kind}, limit)
    raise InvalidParameterError(name, part, 'a text part, {"type": "text", "text": "..."}')


def _marked(message: Mapping[str, object]) -> dict[str, object]:
    content, reasoning = message.get("content"), message.get("reasoning_content")
    if not content and isinstance(reasoning, str) and reasoning:  # an answer that has not begun yet
        return dict(message) | {"reasoning_content": reasoning + _CUT_MARK}
    if not isinstance(content, str):
        raise InvalidParameterError("messages", message, "continue_final_message requires text in the last message")
    return dict(message) | {"content": content + _CUT_MARK}


def _cut_at_mark(text: str) -> str:
    head, found, tail = text.rpartition(_CUT_MARK.rstrip())
    if not found:
        raise InvalidParameterError("continue_final_message", True, "the model's chat template drops the last message")
    return head if tail.startswith(" ") else head.rstrip()


def _environment() -> LimitedEnvironment:
    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationMark, LoopControlExtension]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationMark(Extension):
    """`{% generation %}...{% endgeneration %}` marks text for the training loss; here it renders unchanged."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own declaration is an instance variable

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise _RefusedError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
