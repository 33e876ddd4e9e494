"""From tools to a grammar: calls in the model's own format, with arguments that match the tool's schema.

Formats that write arguments as JSON can be held to any schema; the others (`pythonic`, `qwen3_coder`) to most. Where
one cannot, and the model must call, it does so in the format of `hermes`: `forced_parser` says which it is.
"""

from collections.abc import Collection, Mapping

from octavo.server.openai.parsers.hermes import HermesParser
from octavo.server.openai.parsers.tool_calls import Schemas, ToolCallParser
from octavo.structured_output import StructuralTag, StructuredOutput

_ANY_ARGUMENTS: Mapping[str, object] = {"type": "object"}


def forced_parser(kind: type[ToolCallParser], schemas: Schemas) -> type[ToolCallParser]:
    """Return the format in which a model whose own is `kind` can be made to call these tools."""
    return HermesParser if _tags(kind, schemas) is None else kind


def must_call(kind: type[ToolCallParser], schemas: Schemas, *, parallel: bool) -> StructuredOutput:
    """Return the form of an answer that is one call, or with `parallel` one or more, and nothing else.

    Raises:
        InvalidParameterError: a schema is too large, too deep or no JSON.
    """
    kind, tags = _forced_tags(kind, schemas)
    return StructuredOutput(
        tags=tags, free_text=False, separator=kind.separator, min_tags=1, max_tags=None if parallel else 1
    )


def call_or_answer(kind: type[ToolCallParser], schemas: Schemas, answer_schema: str) -> StructuredOutput:
    """Return the form of an answer that is either one call or JSON that matches `answer_schema`.

    Raises:
        InvalidParameterError: a schema is too large, too deep or no JSON.
    """
    _, tags = _forced_tags(kind, schemas)
    answer = StructuralTag(json_schema=answer_schema)
    return StructuredOutput(tags=[*tags, answer], free_text=False, min_tags=1, max_tags=1)


def may_call(
    kind: type[ToolCallParser], schemas: Schemas, strict: Collection[str], *, parallel: bool
) -> StructuredOutput | None:
    """Return the form of an answer of free text in which calls of the tools in `strict` match their schemas.

    None where the format cannot be held to one of the schemas.

    Raises:
        InvalidParameterError: a schema is too large, too deep or no JSON.
    """
    enforced = {
        name: schema if name in strict or not kind.writes_json else _ANY_ARGUMENTS for name, schema in schemas.items()
    }
    tags = _tags(kind, enforced)
    return None if tags is None else StructuredOutput(tags=tags, max_tags=None if parallel else 1)


def _forced_tags(kind: type[ToolCallParser], schemas: Schemas) -> tuple[type[ToolCallParser], list[StructuralTag]]:
    kind = forced_parser(kind, schemas)
    tags = _tags(kind, schemas)
    assert tags is not None
    return kind, tags


def _tags(kind: type[ToolCallParser], schemas: Schemas) -> list[StructuralTag] | None:
    tags = [kind.tag(name, schema) for name, schema in schemas.items()]
    whole = [tag for tag in tags if tag is not None]
    return whole if len(whole) == len(tags) else None
