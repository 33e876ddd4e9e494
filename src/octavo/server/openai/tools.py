"""The tools of a chat request: validation, and their effects on prompt, constraint and parser; requests' JSON schemas.

Formats that write arguments as JSON can be constrained to any schema; the others (`pythonic`, `qwen3_coder`) to most.
If one cannot, and the model must call, it calls in the format of `hermes`: `ToolUse.forced_parser` decides.

Schemas of arguments and answers are closed: objects have the properties that a schema names, and no others. By the
standard, an object without `additionalProperties` may have any further properties, and a weak model never stops writing
them. OpenAI rejects such schemas in strict mode; vLLM and llama.cpp read them as closed, and so does Octavo.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import msgspec

from octavo.errors import InvalidParameterError
from octavo.sampling_params import SamplingParams
from octavo.server.http.errors import ApiError, bad_request
from octavo.server.openai.parsers.json_calls import HermesParser
from octavo.server.openai.parsers.tool_calls import TAG_CONTENTS, ToolCallParser
from octavo.server.openai.protocol import (
    ChatCompletionRequest,
    FunctionDefinition,
    GrammarFunction,
    TokenizeRequest,
    ToolChoiceObject,
    ToolDefinition,
)
from octavo.structured_output import StructuralTag, StructuredOutput

logger = logging.getLogger(__name__)

_MAX_TOOLS = 1_000
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,256}")
_MODES = ("auto", "none", "required")
_PARAM = "tool_choice"
_DEFINITIONS = ("$defs", "definitions")
_MAPS = ("properties", "patternProperties")
_ONES = ("items", "additionalProperties")
_SAYS = ("additionalProperties", "patternProperties", "unevaluatedProperties")
# Next to these, other schemas name properties of the same object: closing one of them would forbid those of the others.
_COMBINES = ("allOf", "anyOf", "oneOf", "$ref", "if", "not", "dependentSchemas")
_BRANCHES = ("anyOf", "oneOf")
_ANY_TEXT = r"start: /(.|\n)*/"

Schema = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolUse:
    """The tools of a request, validated."""

    prompt_tools: Sequence[Mapping[str, object]]  # as chat templates expect them
    schemas: Mapping[str, Mapping[str, Any]]  # of the allowed tools, by name
    strict: frozenset[str]  # names of tools whose calls must match their schemas or grammars
    grammars: Mapping[str, str]  # of the arguments of tools that have one, by name
    is_required: bool
    is_subset: bool  # the prompt shows more tools, which must not be called
    is_parallel: bool  # whether one answer may call more than once
    own_parser: type[ToolCallParser]  # the model's own

    @property
    def forced_parser(self) -> type[ToolCallParser]:
        """The format in which the model can be forced to call these tools."""
        return HermesParser if self._tags(self.own_parser, self.schemas) is None else self.own_parser

    def parser(self, params: SamplingParams) -> type[ToolCallParser]:
        """Return the parser for answers under the final constraint in `params`."""
        constraint = params.structured_output
        is_free = constraint is None or constraint.kind != "tags" or constraint.free_text
        return self.own_parser if is_free else self.forced_parser

    def constraint(self, answer: StructuredOutput | None) -> StructuredOutput | None:
        """Return the constraint on the whole answer; `answer` is the one on replies without calls."""
        kind = self.own_parser
        most = None if self.is_parallel and not kind.calls_once else 1
        if self.is_required:  # calls and nothing else
            kind = self.forced_parser
            calls = self._tags(kind, self.schemas) or ()
            return StructuredOutput(tags=calls, free_text=False, separator=kind.separator, min_tags=1, max_tags=most)
        if answer is not None:  # one call, or JSON by its schema
            schema = '{"type":"object"}' if answer.json_object else answer.json_schema
            if schema is None:
                return answer
            either = [
                *(self._tags(self.forced_parser, self.schemas) or ()),
                StructuralTag(begin=kind.answer_begin, json_schema=schema),
            ]
            return StructuredOutput(tags=either, free_text=False, min_tags=1, max_tags=1)
        is_free = not (self.strict or self.is_subset)
        if is_free and (self.is_parallel or kind.calls_once) and not kind.marks_names:  # other names are no calls
            return None
        # Calls in free text of these tools, strict ones by their schemas.
        enforced = {
            name: schema if name in self.strict or takes_nothing(schema) else {"type": "object"}
            for name, schema in self.schemas.items()
        }
        tags = kind.loose_tags(enforced) if self.is_parallel and not self.strict & set(self.schemas) else None
        if tags is None:
            tags = self._tags(kind, enforced if kind.writes_json else self.schemas)
        if tags is None and not is_free:
            logger.warning("%s cannot constrain calls in free text to these schemas", kind.__name__)
        if tags is not None and kind.answer_begin:  # a call, or text after what marks it
            text = StructuralTag(begin=kind.answer_begin, grammar=_ANY_TEXT)
            return StructuredOutput(tags=[*tags, text], free_text=False, min_tags=1, max_tags=1)
        return None if tags is None else StructuredOutput(tags=tags, max_tags=most)

    def _tags(self, kind: type[ToolCallParser], schemas: Mapping[str, Schema]) -> list[StructuralTag] | None:
        """Constrain a call to one of these tools, by schemas or grammars; None if the format cannot express one."""
        tags = kind.tags(schemas)
        if tags is None or not self.grammars:
            return tags
        found: list[StructuralTag] = []
        for name, tag in zip(schemas, tags, strict=True):
            if name in self.grammars and tag.json_schema is None:  # grammars are of JSON
                return None
            grammar = self.grammars.get(name)
            found.append(tag if grammar is None else replace(tag, json_schema=None, grammar=grammar))
        return found


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
        grammars={
            tool.function.name: tool.function.arguments_grammar
            for tool in tools
            if isinstance(tool.function, GrammarFunction)
        },
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
    function = FunctionDefinition(name=tool.function.name, description=tool.function.description, parameters=parameters)
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
    tools = request.tools or []
    names = [tool.function.name for tool in tools]
    try:
        chosen: Sequence[str] = tool_choice(request, names).names
    except ApiError:  # then nothing reaches the engine
        chosen = ()
    wire: dict[str, str] = {}
    for number, name in enumerate(chosen):
        index = names.index(name)
        what = "format.definition" if isinstance(tools[index].function, GrammarFunction) else "function.parameters"
        wire |= {f"structured_output.tags[{number}].{content}": f"tools[{index}].{what}" for content in TAG_CONTENTS}
    return wire


def closed(schema: Schema, *, strict: bool) -> Schema:
    """Return the schema with objects closed that name properties; with `strict`, also those that name none.

    Objects that say otherwise (`additionalProperties`) or are described in several places stay as they are.
    """
    maps = _MAPS if any(map(_combines_references, _all_nodes(schema))) else (*_MAPS, *_DEFINITIONS)
    result: Schema = _closed(schema, strict, maps, {})
    return result


def closed_arguments(schema: Schema, *, strict: bool) -> Schema:
    """Return the schema of a tool's arguments, closed; one that names no properties allows `{}` only."""
    if not schema.get("properties") and _may_close(schema):
        return {"type": "object", "properties": {}, **schema, "additionalProperties": False}
    return closed(schema, strict=strict)


def takes_nothing(arguments: Schema) -> bool:
    """Whether `{}` is all that a tool takes."""
    return not arguments.get("properties") and arguments.get("additionalProperties") is False


def _closed(schema: Any, strict: bool, maps: tuple[str, ...], beside: Mapping[str, Any] | None) -> Any:
    """Close one schema; `beside`: what schemas around a branch name for the same object, None if not known."""
    if not isinstance(schema, Mapping):  # true, false, or an error that is reported later, with its place
        return schema
    result = dict(schema)
    for name, inner in schema.items():
        if name in maps and isinstance(inner, Mapping):
            result[name] = {key: _closed(child, strict, maps, {}) for key, child in inner.items()}
        elif name in (*_BRANCHES, "prefixItems") and isinstance(inner, list):
            shared = {} if name == "prefixItems" else _beside(schema, beside)
            result[name] = [_closed(child, strict, maps, shared) for child in inner]
        elif name in _ONES:
            result[name] = _closed(inner, strict, maps, {})
    own, kind = schema.get("properties"), schema.get("type")
    if beside is None or not (own or (strict and (kind == "object" or (isinstance(kind, list) and "object" in kind)))):
        return result
    whole = result
    if beside and isinstance(own, Mapping | None):  # before its own, as they are written
        whole = result | {"properties": {**dict.fromkeys(beside, True), **result.get("properties", {})}}
    return whole | {"additionalProperties": False} if _may_close(whole) else result


def _beside(schema: Schema, beside: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the properties that a schema and those around it name next to its branches; None if not known."""
    others = ("allOf", "$ref", "if", "dependentSchemas", "patternProperties")
    own = schema.get("properties", {})
    if beside is None or not isinstance(own, Mapping) or all(name in schema for name in _BRANCHES):
        return None
    return None if any(name in schema for name in others) else {**beside, **own}


def _may_close(schema: Schema) -> bool:
    """Whether all properties are named here, among them those that the object must have."""
    if any(name in schema for name in (*_SAYS, *_COMBINES)):
        return False
    properties, required, least = schema.get("properties", {}), schema.get("required", []), schema.get("minProperties")
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return False
    has_required = all(isinstance(name, str) and name in properties for name in required)
    return has_required and (least is None or least in range(len(properties) + 1))


def _combines_references(node: Schema) -> bool:
    """Whether definitions may describe one object together with other schemas."""
    branches = node.get("allOf", [])
    num_branches = len(branches) if isinstance(branches, list) else 0
    lists = [node[name] for name in _BRANCHES if isinstance(node.get(name), list)]
    if node.get("properties") and any(isinstance(each, Mapping) and "$ref" in each for each in chain(*lists)):
        return True
    return num_branches + ("$ref" in node) + ("properties" in node) > 1 and num_branches + ("$ref" in node) > 0


def _all_nodes(schema: object) -> Iterator[Schema]:
    nodes = [schema]
    while nodes:
        node = nodes.pop()
        if isinstance(node, Mapping):
            yield node
            nodes += node.values()
        elif isinstance(node, list):
            nodes += node
