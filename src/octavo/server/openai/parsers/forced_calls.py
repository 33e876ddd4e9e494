"""From tools to a grammar: calls in the model's own format, with arguments that match the tool's schema.

Two formats do not write arguments as JSON (`pythonic`, `qwen3_coder`). A model of theirs that must call does so in
the format of `hermes`, and `forced_parser` says that its answer is to be read so.
"""

from collections.abc import Collection, Mapping

from octavo.server.openai.parsers.hermes import HermesParser
from octavo.server.openai.parsers.tool_calls import Schemas, ToolCallParser
from octavo.structured_output import StructuralTag, StructuredOutput

_NO_ARGUMENTS: Mapping[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_ARGUMENTS: Mapping[str, object] = {"type": "object"}


def forced_parser(kind: type[ToolCallParser]) -> type[ToolCallParser]:
    """Return the format in which a model whose own is `kind` can be made to call."""
    return HermesParser if kind.frame("f") is None else kind


def must_call(kind: type[ToolCallParser], schemas: Schemas, *, parallel: bool) -> StructuredOutput:
    """Return the form of an answer that is one call, or with `parallel` one or more, and nothing else.

    `kind` is one that `forced_parser` gives.

    Raises:
        InvalidParameterError: a schema is too large, too deep or no JSON.
    """
    return StructuredOutput(
        tags=_tags(kind, schemas),
        free_text=False,
        separator=kind.separator,
        min_tags=1,
        max_tags=None if parallel else 1,
    )


def call_or_answer(kind: type[ToolCallParser], schemas: Schemas, answer_schema: str) -> StructuredOutput:
    """Return the form of an answer that is either one call or JSON that matches `answer_schema`.

    `kind` is one that `forced_parser` gives.

    Raises:
        InvalidParameterError: a schema is too large, too deep or no JSON.
    """
    answer = StructuralTag(json_schema=answer_schema)
    return StructuredOutput(tags=[*_tags(kind, schemas), answer], free_text=False, min_tags=1, max_tags=1)


def may_call(
    kind: type[ToolCallParser], schemas: Schemas, strict: Collection[str], *, parallel: bool
) -> StructuredOutput:
    """Return the form of an answer of free text in which calls of the tools in `strict` match their schemas.

    `kind` is one that has frames.

    Raises:
        InvalidParameterError: a schema is too large, too deep or no JSON.
    """
    enforced = {name: schema if name in strict else _ANY_ARGUMENTS for name, schema in schemas.items()}
    return StructuredOutput(tags=_tags(kind, enforced), max_tags=None if parallel else 1)


def _tags(kind: type[ToolCallParser], schemas: Schemas) -> list[StructuralTag]:
    return [_tag(kind, name, schema) for name, schema in schemas.items()]


def _tag(kind: type[ToolCallParser], name: str, schema: Mapping[str, object]) -> StructuralTag:
    frame = kind.frame(name)
    assert frame is not None
    return StructuralTag(
        begin=frame.begin, json_schema=dict(schema or _NO_ARGUMENTS), end=frame.end, trigger=frame.trigger
    )
