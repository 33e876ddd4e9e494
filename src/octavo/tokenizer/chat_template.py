"""`ChatTemplate`: renders a conversation to a prompt with the checkpoint's Jinja template.

Templates are untrusted code and run in a sandbox (`template_sandbox.py`). The dialect is that of Hugging Face
checkpoints (https://huggingface.co/docs/transformers/chat_templating): trimmed blocks, `break` and `continue`,
`raise_exception`, `strftime_now`, `tojson` without HTML escapes, and `{% generation %}` marks, which only matter for
training.

Templates differ in what they want for an absent text, and for the arguments of a call. Clients send null beside calls.
Some templates test for it (`content is none`) and write no calls otherwise, some concatenate and need text, some write
whatever they are given. Most read arguments as an object, some as JSON text. Each kind of message is tried once per
template, in every form; the first that shows most is taken.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser

from octavo.errors import InvalidParameterError
from octavo.tokenizer.answer_history import AnswerHistory
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

Message = Mapping[str, object]

_CONTENTS: tuple[Message, ...] = ({"content": None}, {}, {"content": ""})  # the first is what transformers passes
_ROLES = ("assistant", "tool", "function", "ipython")  # roles are users' words: no more of them are tried
_CALL_ID = "abcdefghi"  # of nine letters, as Mistral's templates require
_FUNCTION = {"name": "octavo_call", "arguments": {"octavo_key": "x"}}
_CALL = {"id": _CALL_ID, "type": "function", "function": _FUNCTION}
_BADLY_WRITTEN = ("None", "'octavo_key'", '\\"octavo_key')  # a null, an object as Python writes it, JSON within JSON
_USER: Message = {"role": "user", "content": "x"}
_RESULT: Message = {"role": "tool", "tool_call_id": _CALL_ID, "content": "x"}


@dataclass(frozen=True, slots=True)
class MessageForm:
    """The form of one kind of message."""

    absent: Message  # the fields that stand for absent text
    arguments_as_text: bool

    def formed(self, message: Message) -> dict[str, object]:
        plain = dict(message) if "content" in message else {**message, **self.absent}
        if self.arguments_as_text and isinstance(calls := plain.get("tool_calls"), list):
            plain["tool_calls"] = [_with_text(call) for call in calls]
        return plain


_FORMS = tuple(MessageForm(absent, as_text) for as_text in (False, True) for absent in _CONTENTS)
# Some clients send empty text beside calls: it stays so unless the template then writes no calls.
_FORMS_OF_EMPTY = tuple(MessageForm(absent, as_text) for as_text in (False, True) for absent in reversed(_CONTENTS))


def _with_text(call: object) -> object:
    """Return a call with its arguments as JSON text."""
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call
    arguments = function.get("arguments")
    if arguments is None or isinstance(arguments, str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}


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
        self._compiled: dict[str, tuple[Template, frozenset[str]]] = {}  # by source: the template, and its variables
        self._forms: dict[tuple[str, bool, bool, bool, bool], MessageForm] = {}

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
        `add_generation_prompt` is then off. Raises InvalidParameterError: malformed messages, or messages that the
        template rejects.
        """
        plain = plain_messages(messages)
        roles = [message["role"] for message in plain]
        if "developer" not in self.source:
            plain = [message | {"role": "system"} if message["role"] == "developer" else message for message in plain]
        if self.must_merge(plain):  # all system messages into one, the first message
            texts = [str(message["content"]) for message in plain if message["role"] in SYSTEM_ROLES]
            others = [message for message in plain if message["role"] not in SYSTEM_ROLES]
            plain = [{"role": "system", "content": "\n\n".join(texts)}, *others]
        if continue_final_message:
            plain[-1] = _marked(plain[-1])
            add_generation_prompt = False
        formed = [self._in_form(message, bool(tools)) for message in self.history.arranged(plain)]
        context = {
            **self._special_tokens,
            "messages": self._as_read(formed),
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

    @cached_property
    def history(self) -> AnswerHistory:
        """What the template does with earlier answers."""

        def write(messages: Sequence[Message]) -> str | None:
            return self._write(self._as_read([self._in_form(message, False) for message in messages]), tools=None)

        return AnswerHistory(self.source, write)

    def must_merge(self, messages: Sequence[Mapping[str, object]]) -> bool:
        """Whether `render` merges system messages into the first one: the template has no place for later ones."""
        return any(each.get("role") in SYSTEM_ROLES for each in messages[1:]) and not self.takes_late_system

    @cached_property
    def takes_late_system(self) -> bool:
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

    def _in_form(self, message: Message, with_tools: bool) -> Message:
        """Return a message, which holds no nulls, as the template reads it."""
        role, text, has_calls = str(message["role"]), message.get("content"), bool(message.get("tool_calls"))
        if (text is not None and not has_calls) or role not in _ROLES:  # nearly always
            return message
        was_empty = text == ""
        kind = (role, bool(text), has_calls, with_tools, was_empty)
        if kind not in self._forms:
            trial = {"role": role} | ({"content": "x"} if text else {}) | ({"tool_calls": [_CALL]} if has_calls else {})
            forms = _FORMS_OF_EMPTY if was_empty else _FORMS
            self._forms[kind] = max(forms, key=lambda form: self._quality(form.formed(trial), with_tools))
        plain = {key: value for key, value in message.items() if not was_empty or key != "content"}
        return self._forms[kind].formed(plain)

    def _quality(self, message: Message, with_tools: bool) -> tuple[bool, bool, bool]:
        """Return whether the template takes a message, writes its call, and writes all of it well: the most is best."""
        conversations: list[list[Message]] = [[_USER, message, _USER]]
        if message["role"] == "tool":
            asks = self._in_form({"role": "assistant", "tool_calls": [_CALL]}, with_tools)
            conversations = [[_USER, asks, {**message, "tool_call_id": _CALL_ID}]]
        elif message.get("tool_calls"):
            conversations.insert(0, [_USER, message, _RESULT])
        tools = _TRIAL_TOOLS if with_tools else None
        texts = (self._write(self._as_read(conversation), tools) for conversation in conversations)
        text = next((text for text in texts if text is not None), None)
        if text is None:
            return False, False, False
        return True, "octavo_call" in text, not any(each in text for each in _BADLY_WRITTEN)

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
        return variable in self._compile(with_tools=with_tools)[1]

    def check(self) -> None:
        """Compile the template now rather than on first use."""
        try:
            self._compile(with_tools=False)
        except TemplateError as error:
            raise InvalidParameterError("chat_template", self.source[:100], f"not a Jinja template: {error}") from error

    def _render(self, context: Mapping[str, Any]) -> str:
        return render_limited(self._compile(with_tools=bool(context["tools"]))[0], dict(context))

    def _compile(self, *, with_tools: bool) -> tuple[Template, frozenset[str]]:
        source = self.source if self.tool_use_source is None or not with_tools else self.tool_use_source
        if source not in self._compiled:
            environment = _environment()
            names = frozenset(node.name for node in environment.parse(source).find_all(nodes.Name))
            self._compiled[source] = environment.from_string(source), names
        return self._compiled[source]


def plain_messages(messages: object) -> list[dict[str, object]]:
    """Check a conversation and normalize it for templates: text as one string, no nulls."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise InvalidParameterError("messages", messages, "a list of at least one message")
    return [_plain_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


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
