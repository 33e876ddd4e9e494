"""What is wrong with a form is told at the front door, with the place, and at once even where it was meant to hurt."""

from typing import Any

import pytest

from octavo.errors import InvalidParameterError
from octavo.structured.checker import check_structured_output
from octavo.structured_output import Reasoning, StructuralTag, StructuredOutput

NO_SUCH_TYPE = {"type": "strnig"}


def refusal(constraint: StructuredOutput) -> InvalidParameterError:
    with pytest.raises(InvalidParameterError) as caught:
        check_structured_output(constraint)
    assert len(str(caught.value)) < 1000
    return caught.value


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (NO_SUCH_TYPE, "at $: Invalid type"),
        ({"properties": {"a": {}, "b": {"items": NO_SUCH_TYPE}}}, "at $.properties.b.items: Invalid type"),
        ({"anyOf": [{"type": "null"}, {"contains": {}}]}, "at $.anyOf[1]: unsupported"),
        ({"$defs": {"q": {"properties": {"z": NO_SUCH_TYPE}}}, "$ref": "#/$defs/q"}, "at $.$defs.q.properties.z:"),
        ({"prefixItems": [{}, {"pattern": "(?=a)"}]}, "at $.prefixItems[1]: look-around"),
        ({"additionalProperties": {"uniqueItems": True}}, "at $.additionalProperties: unsupported"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "at $.properties.a: Pointer '/$defs/none' does not exist"),
        ({"$ref": "http://example.com/schema.json"}, "at $: "),
        ({"enum": []}, "at $: Unsatisfiable"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "at $: Unsatisfiable"),
        ({"oneOf": [{"type": "number"}, {"minimum": 3}]}, "at $: oneOf"),
    ],
)
def test_a_schema_is_refused_where_it_is_wrong(schema: dict[str, Any], place: str) -> None:
    error = refusal(StructuredOutput(json_schema=schema))
    assert error.field == "structured_output.json_schema"
    assert place in error.limit


@pytest.mark.parametrize(
    ("constraint", "field", "limit"),
    [
        (StructuredOutput(regex="a("), "regex", "unclosed group"),
        (StructuredOutput(regex=r"(a)\1"), "regex", "backreferences are not supported"),
        (StructuredOutput(grammar="start: foo"), "grammar", 'unknown name: "foo"'),
        (StructuredOutput(grammar="root ::= foo"), "grammar", "Rule 'foo' not found"),
        (StructuredOutput(grammar='root ::= ("a"'), "grammar", "line 1"),
        (StructuredOutput(tags=[StructuralTag(begin="<a>", json_schema=NO_SUCH_TYPE)]), "tags[0].json_schema", "at $:"),
        (
            StructuredOutput(
                tags=[StructuralTag(begin="<a>", json_schema={}), StructuralTag(begin="<b>", grammar="start: x")]
            ),
            "tags[1].grammar",
            'unknown name: "x"',
        ),
    ],
)
def test_other_forms_are_refused_with_a_reason(constraint: StructuredOutput, field: str, limit: str) -> None:
    error = refusal(constraint)
    assert error.field == f"structured_output.{field}"
    assert limit in error.limit


@pytest.mark.parametrize(
    ("constraint", "limit"),
    [
        (StructuredOutput(json_schema={"type": "array", "minItems": 10**9}), "at $.minItems: 1000000000"),
        (
            StructuredOutput(json_schema={"properties": {"a": {"items": {"type": "string", "minLength": 1e9}}}}),
            "at $.properties.a.items.minLength",
        ),
        (
            StructuredOutput(json_schema={"prefixItems": [{"minLength": 4000}, {"minLength": 4000}]}),
            "at $.prefixItems[1].minLength: minLength of all strings is more than 7500 characters",
        ),
        (StructuredOutput(regex="a{1000000000}"), "at 1: more than"),
        (StructuredOutput(regex=r"\\a{3}b{2,1000000000}"), "more than"),
        (StructuredOutput(regex="(" * 50_000 + "a" + ")" * 50_000), "nest"),
        (StructuredOutput(grammar="start: " + "(" * 50_000 + '"a"' + ")" * 50_000), "nested"),
        (StructuredOutput(grammar="root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000), "deep"),
        (
            StructuredOutput(
                json_schema={
                    "allOf": [{"anyOf": [{"properties": {f"{i}-{j}": {}}} for j in range(12)]} for i in range(12)]
                }
            ),
            "too large",
        ),
    ],
)
def test_bombs_are_refused(constraint: StructuredOutput, limit: str) -> None:
    assert limit in refusal(constraint).limit


@pytest.mark.parametrize(
    "constraint",
    [
        StructuredOutput(json_schema={"type": "string", "maxLength": 2**31 - 1}),  # generators write it
        StructuredOutput(json_schema={"type": "string", "format": "password"}),  # a remark, by the standard
        StructuredOutput(json_schema={"properties": {"format": {"type": "string"}, "minItems": {"const": 10**9}}}),
        StructuredOutput(json_schema={"title": "T", "description": "d", "$comment": "c", "default": 1, "x-mine": {}}),
        StructuredOutput(json_schema={"x-guidance": {"coerce_one_of": True, "whitespace_pattern": "a("}}),
        StructuredOutput(regex=r"a\{99999999}"),
        StructuredOutput(regex="(a+)+$"),
        StructuredOutput(regex="(a|b)*a(a|b){30}"),
        StructuredOutput(json_schema={"enum": [f"x{i}" for i in range(20_000)]}),
        StructuredOutput(choice=['a"\n\x01\x7fé🙂\\', "/"]),
        StructuredOutput(reasoning=Reasoning(max_tokens=5)),
        StructuredOutput(json_object=True),
    ],
)
def test_what_only_looks_wrong_is_not_refused(constraint: StructuredOutput) -> None:
    check_structured_output(constraint)


def test_a_schema_cannot_choose_the_compiler_options() -> None:
    """Where branches overlap, `oneOf` cannot be held to; an option of the library would pretend that it can."""
    schema = {"x-guidance": {"coerce_one_of": True}, "oneOf": [{"type": "number"}, {"minimum": 3}]}
    assert "oneOf" in refusal(StructuredOutput(json_schema=schema)).limit
