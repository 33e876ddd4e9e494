"""The tools of a chat request: validation, and their effects on prompt, constraint and parser.

Formats that write arguments as JSON can be constrained to any schema; the others (`pythonic`, `qwen3_coder`) to most.
If one cannot, and the model must call, it calls in the format of `hermes`: `ToolUse.forced_parser` decides.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.errors import InvalidParameterError
from octavo.sampling_params import SamplingParams
from octavo.server.errors import ApiError, bad_request
from octavo.server.openai.parsers.json_calls import HermesParser
from octavo.server.openai.parsers.tool_calls import TAG_CONTENTS, ToolCallParser
from octavo.server.openai.protocol import ChatCompletionRequest, TokenizeRequest, ToolChoiceObject, ToolDefinition
from octavo.server.openai.schemas import closed_arguments, takes_nothing
from octavo.structured_output import StructuralTag, StructuredOutput

logger = logging.getLogger(__name__)

_MAX_TOOLS = 1_000
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,256}")
_MODES = ("auto", "none", "required")
_PARAM = "tool_choice"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolUse:
    """The tools of a request, validated."""

    prompt_tools: Sequence[Mapping[str, object]]  # as chat templates expect them
    schemas: Mapping[str, Mapping[str, Any]]  # of the allowed tools, by name
    strict: frozenset[str]  # names of tools whose calls must match their schemas
    is_required: bool
    is_subset: bool  # the prompt shows more tools, which must not be called
    is_parallel: bool  # whether one answer may call more than once
    own_parser: type[ToolCallParser]  # the model's own

    @property
    def forced_parser(self) -> type[ToolCallParser]:
        """The format in which the model can be forced to call these tools."""
        return HermesParser if self.own_parser.tags(self.schemas) is None else self.own_parser

    def parser(self, params: SamplingParams) -> type[ToolCallParser]:
        """Return the parser for answers under the final constraint in `params`."""
        constraint = params.structured_output
        is_free = constraint is None or constraint.kind != "tags" or constraint.free_text
        return self.own_parser if is_free else self.forced_parser

    def constraint(self, answer: StructuredOutput | None) -> StructuredOutput | None:
        """Return the constraint on the whole answer; `answer` is the one on replies without calls."""
        kind, most = self.own_parser, None if self.is_parallel else 1
        if self.is_required:  # calls and nothing else
            kind = self.forced_parser
            calls = kind.tags(self.schemas) or ()
            return StructuredOutput(tags=calls, free_text=False, separator=kind.separator, min_tags=1, max_tags=most)
        if answer is not None:  # one call, or JSON by its schema
            schema = '{"type":"object"}' if answer.json_object else answer.json_schema
            if schema is None:
                return answer
            either = [*(self.forced_parser.tags(self.schemas) or ()), StructuralTag(json_schema=schema)]
            return StructuredOutput(tags=either, free_text=False, min_tags=1, max_tags=1)
        is_free = not (self.strict or self.is_subset)
        if is_free and self.is_parallel and not kind.marks_names:  # other names are no calls
            return None
        # Calls in free text of these tools, strict ones by their schemas.
        enforced = {
            name: schema if name in self.strict or takes_nothing(schema) else {"type": "object"}
            for name, schema in self.schemas.items()
        }
        tags = kind.loose_tags(enforced) if self.is_parallel and not self.strict & set(self.schemas) else None
        if tags is None:
            tags = kind.tags(enforced if kind.writes_json else self.schemas)
        if tags is None and not is_free:
            logger.warning("%s cannot constrain calls in free text to these schemas", kind.__name__)
        return None if tags is None else StructuredOutput(tags=tags, max_tags=most)


def shown_tools(request: TokenizeRequest) -> list[Mapping[str, object]] | None:
    """Return the tools of a request as its chat would show them to the model; None: it shows none."""
    tools = request.tools or []
    schemas = _checked_schemas(tools)
    if tool_choice(request, list(schemas)).mode == "none" or not tools:
        return None
    return [_prompt_tool(tool) for tool in tools]


def tool_use(request: ChatCompletionRequest, own_parser: type[ToolCallParser] | None) -> ToolUse | None:
    """Check the tools of a request; return None if none may be called."""
    tools = request.tools or []
    schemas = _checked_schemas(tools)
    choice = tool_choice(request, list(schemas))
    if not tools or choice.mode == "none":
        return None
    if own_parser is None:
        text = "No tool call format is known for this model; see the server's --tool-call-parser."
        raise bad_request(text, "tools", "unsupported_parameter")
    return ToolUse(
        prompt_tools=[_prompt_tool(tool) for tool in tools],
        schemas={name: schemas[name] for name in choice.names},
        strict=frozenset(tool.function.name for tool in tools if tool.function.strict),
        is_required=choice.mode == "required",
        is_subset=choice.is_subset,
        is_parallel=request.parallel_tool_calls is not False and not choice.is_named,
        own_parser=own_parser,
    )


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The resolved `tool_choice`; its names are those of existing tools."""

    mode: str  # auto, none or required
    names: tuple[str, ...]  # the allowed tools
    is_subset: bool = False  # of the tools shown to the model
    is_named: bool = False  # one named call must be made


def tool_choice(request: ChatCompletionRequest | TokenizeRequest, names: Sequence[str]) -> ToolChoice:
    """Return a request's choice among the tools called `names`."""
    choice = request.tool_choice
    if isinstance(choice, ToolChoiceObject):
        if choice.type == "function" and choice.function is not None:
            return ToolChoice("required", _among((choice.function.name,), names), is_subset=True, is_named=True)
        if choice.type == "allowed_tools" and choice.allowed_tools is not None:
            mode, tools = choice.allowed_tools.mode, choice.allowed_tools.tools
            chosen = _among([tool.function.name for tool in tools], names)
            if mode not in _MODES:
                path = f"{_PARAM}.allowed_tools.mode"
                raise bad_request(f"{path} must be auto or required.", path)
            return ToolChoice(mode, chosen, is_subset=True)
        missing = f"{_PARAM}.{choice.type}"
        raise bad_request(f"Missing required parameter: '{missing}'.", missing, "missing_required_parameter")
    if choice not in (None, *_MODES):
        raise bad_request(f"tool_choice must be one of {', '.join(_MODES)}, or an object.", _PARAM)
    if choice == "required" and not names:
        raise bad_request("'tool_choice' requires 'tools'.", _PARAM)
    return ToolChoice(choice or "auto", tuple(names))


def _among(chosen: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    for name in chosen:
        if name not in names:
            raise bad_request(f"'tool_choice' names '{name}', which is not among the tools.", _PARAM)
    if not chosen:
        raise bad_request("'tool_choice' must leave at least one tool.", _PARAM)
    return tuple(dict.fromkeys(chosen))


def _prompt_tool(tool: ToolDefinition) -> dict[str, object]:
    """Return a tool in the form seen in training: always with parameters, and without `strict`."""
    parameters = tool.function.parameters or {"type": "object", "properties": {}}
    function = msgspec.structs.replace(tool.function, strict=None, parameters=parameters)
    plain: dict[str, object] = msgspec.to_builtins(msgspec.structs.replace(tool, type="function", function=function))
    return plain


def _checked_schemas(tools: Sequence[ToolDefinition]) -> dict[str, Mapping[str, Any]]:
    if len(tools) > _MAX_TOOLS:
        raise bad_request(f"{len(tools)} tools; at most {_MAX_TOOLS} are allowed.", "tools")
    schemas: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools[{index}]")
        if tool.function.name in schemas:
            raise bad_request(f"Two tools are named '{tool.function.name}'.", f"tools[{index}].function.name")
        parameters = tool.function.parameters or {}
        if isinstance(parameters.get("type"), list):  # some generators write types as lists
            parameters = parameters | {"type": "object"}
        schemas[tool.function.name] = closed_arguments(parameters, strict=bool(tool.function.strict))
    return schemas


def _check_tool(tool: ToolDefinition, path: str) -> None:
    if tool.type not in (None, "function"):
        raise bad_request(f"{path}.type must be 'function'.", f"{path}.type")
    if not _NAME.fullmatch(tool.function.name):
        text = "must be 1 to 256 letters, digits, underscores, dots and hyphens."
        raise bad_request(f"{path}.function.name {text}", f"{path}.function.name")
    schema, param = tool.function.parameters or {}, f"{path}.function.parameters"
    types = schema.get("type", "object")
    if types != "object" and not (isinstance(types, list) and "object" in types):
        raise bad_request(f"{param}: arguments are an object, so the schema's type must be 'object'.", param)
    try:
        StructuredOutput(json_schema=schema)
    except InvalidParameterError as error:
        raise bad_request(f"{param}: {error.limit}", param) from error


def tool_wire_names(request: ChatCompletionRequest) -> dict[str, str]:
    """Return the wire names of tool fields that the engine may reject: a tag's schema is that of a tool."""
    names = [tool.function.name for tool in request.tools or []]
    try:
        chosen: Sequence[str] = tool_choice(request, names).names
    except ApiError:  # then nothing reaches the engine
        chosen = ()
    return {
        f"structured_output.tags[{number}].{content}": f"tools[{names.index(name)}].function.parameters"
        for number, name in enumerate(chosen)
        for content in TAG_CONTENTS
    }
