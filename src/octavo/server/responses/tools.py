"""Tools of a Responses request as functions of a chat, and back: which call of a function is which call for the client.

To the model all tools are functions: a `custom` tool has one string, and a tool inside a `namespace` a joined name.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from octavo.errors import InvalidParameterError
from octavo.server.http.errors import ApiError, bad_request
from octavo.server.openai.params import Warn
from octavo.server.openai.protocol import (
    AllowedTool,
    AllowedTools,
    FunctionDefinition,
    GrammarFunction,
    NamedFunction,
    ToolChoiceObject,
    ToolDefinition,
    type_error,
)
from octavo.server.openai.translation import missing
from octavo.server.responses.protocol import ResponsesRequest, ResponsesToolChoice, Tool, ToolFormat
from octavo.structured.json_text import in_json_object, matching_in_json_object

T = TypeVar("T")

_INPUT = "input"  # the one argument of a custom tool
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {_INPUT: {"type": "string"}},
    "required": [_INPUT],
    "additionalProperties": False,
}
_INPUT_START = re.compile(rf'\s*\{{\s*"{_INPUT}"\s*:\s*"')
_WHOLE_CHARACTERS = re.compile(  # of a JSON string: no half of an escape, or of a pair of surrogates
    r"""(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"""
    r"""|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*"""
)
_FUNCTION, _CUSTOM, _NAMESPACE = "function", "custom", "namespace"
_MODES = ("auto", "required", "none")
_MAX_GRAMMARS = 20_000  # characters of all in a request
_SYNTAXES = {"lark": in_json_object, "regex": matching_in_json_object}


@dataclass(frozen=True, slots=True)
class KnownTool:
    """A tool as the client knows it."""

    name: str
    namespace: str | None
    is_custom: bool


@dataclass(frozen=True, slots=True)
class ToolNames:
    """The tools of a request by the names of their functions in the chat."""

    definitions: list[ToolDefinition] = field(default_factory=list)
    known: dict[str, KnownTool] = field(default_factory=dict)

    def of_call(self, name: str) -> KnownTool:
        """Return the tool that the model has called; another name is that of a function."""
        return self.known.get(name) or KnownTool(name, None, is_custom=False)

    def in_chat(self, name: str, namespace: str | None) -> str:
        """Return the name of a function in the chat, for a tool as the client names it."""
        for chat_name, tool in self.known.items():
            if (tool.name, tool.namespace) == (name, namespace):
                return chat_name
        return name if namespace is None else joined(namespace, name)


def joined(namespace: str, name: str) -> str:
    return f"{namespace.rstrip('_')}__{name}"


def chat_tools(tools: Sequence[Mapping[str, Any]], places: dict[str, str], warn: Warn) -> ToolNames:
    """Return the tools of a request, their places in it added to `places`. Raises ApiError, 400."""
    names, num_characters = ToolNames(), 0
    for index, given in enumerate(tools):
        for path, namespace, tool in _flat(given, f"tools[{index}]", warn):
            num_characters += len(str((tool.format or {}).get("definition", "")))
            if num_characters > _MAX_GRAMMARS:
                text = f"{path}.format.definition: all grammars have at most {_MAX_GRAMMARS} characters together."
                raise bad_request(text, f"{path}.format.definition")
            function = _function(tool, path, namespace)
            places[f"tools[{len(names.definitions)}]"] = path
            known = KnownTool(tool.name or "", namespace, is_custom=tool.type == _CUSTOM)
            if function.name in names.known:
                raise bad_request(f"Two tools are named '{function.name}'.", f"{path}.name")
            names.definitions.append(ToolDefinition(type=_FUNCTION, function=function))
            names.known[function.name] = known
    return names


def _flat(
    given: Mapping[str, Any], path: str, warn: Warn, namespace: str | None = None
) -> Iterator[tuple[str, str | None, Tool]]:
    """Yield the tools that the model may call, with path and namespace."""
    tool = converted(given, Tool, path)
    if tool.type in (_FUNCTION, _CUSTOM):
        yield path, namespace, tool
    elif tool.type == _NAMESPACE and namespace is None:
        if not tool.name:
            raise missing(f"{path}.name")
        for index, inner in enumerate(tool.tools or ()):
            yield from _flat(inner, f"{path}.tools[{index}]", warn, tool.name)
    else:
        warn(f"{path} is left out: this server has no tool {tool.type[:60]!r}")


def _function(tool: Tool, path: str, namespace: str | None) -> FunctionDefinition:
    if not tool.name:
        raise missing(f"{path}.name")
    name = tool.name if namespace is None else joined(namespace, tool.name)
    if tool.type == _FUNCTION:
        return FunctionDefinition(
            name=name, description=tool.description, parameters=tool.parameters, strict=tool.strict
        )
    return _custom_function(tool, name, path)


def _custom_function(tool: Tool, name: str, path: str) -> FunctionDefinition:
    """Return a custom tool as a function with one string, which follows its grammar; the model is shown it, too."""
    wanted = converted(tool.format or {}, ToolFormat, f"{path}.format")
    if wanted.type == "text":
        return FunctionDefinition(name=name, description=tool.description, parameters=_CUSTOM_PARAMETERS)
    if wanted.type != "grammar":
        raise bad_request(f"{path}.format.type={wanted.type[:40]!r}: text or grammar", f"{path}.format.type")
    if wanted.definition is None:
        raise missing(f"{path}.format.definition")
    if wanted.syntax not in _SYNTAXES:
        raise bad_request(f"{path}.format.syntax={wanted.syntax[:40]!r}: lark or regex", f"{path}.format.syntax")
    try:
        grammar = _SYNTAXES[wanted.syntax](_INPUT, wanted.definition)
    except InvalidParameterError as error:
        text = f"{path}.format.definition: {error.limit}, not {error.value!r}"
        raise bad_request(text, f"{path}.format.definition") from error
    shown = f"The input has this form ({wanted.syntax}):\n{wanted.definition}"
    return GrammarFunction(
        name=name,
        description=f"{tool.description or ''}\n\n{shown}".strip(),
        parameters=_CUSTOM_PARAMETERS,
        strict=True,
        arguments_grammar=grammar,
    )


def custom_input(arguments: str) -> str:
    """Return the raw input of a custom tool's call; text that is no such call, as one that was cut off, stays."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    found = value.get(_INPUT) if isinstance(value, dict) else None
    return found if isinstance(found, str) else arguments


class InputReader:
    """Reads the raw input of a custom tool's call while its arguments are written."""

    def __init__(self) -> None:
        self._arguments = ""
        self._position = 0  # of what has not been read
        self.text = ""  # of the input so far

    def push(self, arguments: str) -> str:
        """Return what more of the arguments adds to the input."""
        self._arguments += arguments
        if not self._position and (start := _INPUT_START.match(self._arguments)) is not None:
            self._position = start.end()
        if not self._position:
            return ""
        found = _WHOLE_CHARACTERS.match(self._arguments, self._position)
        assert found is not None
        self._position = found.end()
        new = str(json.loads(f'"{found[0]}"'))
        self.text += new
        return new

    def finish(self) -> str:
        """Return the rest of the input, now that all arguments are there. Of a call that was cut off, there is none."""
        whole = custom_input(self._arguments)
        rest = whole[len(self.text) :] if whole.startswith(self.text) and not self._is_cut_off(whole) else ""
        self.text += rest
        return rest

    def _is_cut_off(self, whole: str) -> bool:
        """Whether the arguments are no JSON, though they have begun as those of a custom tool."""
        return bool(self._position) and whole == self._arguments


def custom_arguments(text: str) -> dict[str, Any]:
    """Return the arguments that stand for a custom tool's input in the chat."""
    return {_INPUT: text}


def chat_tool_choice(request: ResponsesRequest, names: ToolNames, warn: Warn) -> str | ToolChoiceObject | None:
    """Return the choice in the words of a chat. One of a tool that was left out has no effect, with a warning."""
    choice = request.tool_choice
    if choice is None or isinstance(choice, str):
        return choice
    if choice.type == "allowed_tools":
        mode = choice.mode or "auto"
        if mode not in _MODES:
            raise bad_request(f"tool_choice.mode={mode[:40]!r}: auto or required", "tool_choice.mode")
        allowed = [
            AllowedTool(function=NamedFunction(name=_named(tool, names, f"tool_choice.tools[{index}]")))
            for index, tool in enumerate(choice.tools or ())
            if _is_known(tool, warn)
        ]
        return ToolChoiceObject(type="allowed_tools", allowed_tools=AllowedTools(tools=allowed, mode=mode))
    if not _is_known(choice, warn):
        return None
    return ToolChoiceObject(function=NamedFunction(name=_named(choice, names, "tool_choice")))


def _is_known(choice: ResponsesToolChoice, warn: Warn) -> bool:
    is_known = choice.type in (_FUNCTION, _CUSTOM)
    if not is_known:
        warn(f"tool_choice has no effect: this server has no tool {choice.type[:60]!r}")
    return is_known


def _named(choice: ResponsesToolChoice, names: ToolNames, path: str) -> str:
    if choice.name is None:
        raise missing(f"{path}.name")
    return names.in_chat(choice.name, choice.namespace)


def converted(value: Mapping[str, Any], kind: type[T], path: str) -> T:
    """Return an object of the request in its type. Raises ApiError, 400: names the field."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _placed(type_error(str(error)), path) from error


def _placed(error: ApiError, path: str) -> ApiError:
    """Return an error about a part of the request, with the part's path before the field's."""
    detail = error.detail
    param = path if detail.param is None else f"{path}.{detail.param}"
    text = detail.message
    if detail.param is not None:
        text = text.replace(f"'{detail.param}'", f"'{param}'", 1)
    else:
        text = text.replace("Invalid request body", f"Invalid type for '{path}'", 1)
    return bad_request(text, param, detail.code)
