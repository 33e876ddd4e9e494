"""The form that an answer must have: OpenAI's `response_format`, vLLM's `structured_outputs` and older `guided_*`."""

from octavo.errors import InvalidParameterError
from octavo.server.errors import as_api_error, bad_request
from octavo.server.openai.protocol import GenerationRequest, ResponseFormat
from octavo.structured_output import StructuredOutput

Form = tuple[str, object, str]  # a field of StructuredOutput, its value, its path on the wire


def requested_form(request: GenerationRequest) -> StructuredOutput | None:
    """Return the one form that a request asks for, None for free text.

    Raises:
        ApiError: 400; several forms, an unknown one, a schema that is missing or malformed.
    """
    forms = _forms(request)
    if not forms:
        return None
    if len(forms) > 1:
        paths = [path for _, _, path in forms]
        raise bad_request(f"Only one of {', '.join(paths)} may be given.", paths[1])
    ((field, value, path),) = forms
    try:
        return StructuredOutput(**{field: value})  # type: ignore[arg-type]  # it checks itself
    except InvalidParameterError as error:
        raise as_api_error(error, {field: path}) from error


def form_paths(request: GenerationRequest) -> dict[str, str]:
    """Return the wire path of the field that holds the form, for errors that are found later."""
    return {f"structured_output.{field}": path for field, _, path in _forms(request)}


def needs_grammar(request: GenerationRequest) -> bool:
    """Whether somebody's schema, pattern or grammar may have to be looked at, which may take a while."""
    if getattr(request, "tools", None):
        return True
    given = (request.response_format, request.structured_outputs, request.guided_json, request.guided_regex)
    return any(field is not None for field in (*given, request.guided_choice, request.guided_grammar))


def _forms(request: GenerationRequest) -> list[Form]:
    return [*_response_format(request.response_format), *_structured(request), *_guided(request)]


def _response_format(wanted: ResponseFormat | None) -> list[Form]:
    if wanted is None or wanted.type == "text":
        return []
    if wanted.type == "json_object":
        if wanted.schema is not None:
            return [("json_schema", wanted.schema, "response_format.schema")]
        return [("json_object", True, "response_format")]
    if wanted.type != "json_schema":
        known = "one of text, json_object, json_schema"
        raise bad_request(f"response_format.type={wanted.type!r}: {known}", "response_format.type")
    schema = wanted.json_schema.schema if wanted.json_schema is not None else wanted.schema
    path = "response_format.json_schema.schema"
    if schema is None:
        raise bad_request(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")
    return [("json_schema", schema, path)]


def _structured(request: GenerationRequest) -> list[Form]:
    wanted = request.structured_outputs
    if wanted is None:
        return []
    values: list[Form] = [
        ("json_schema", wanted.json, "structured_outputs.json"),
        ("json_object", wanted.json_object or None, "structured_outputs.json_object"),
        ("regex", wanted.regex, "structured_outputs.regex"),
        ("choice", wanted.choice, "structured_outputs.choice"),
        ("grammar", wanted.grammar, "structured_outputs.grammar"),
    ]
    return [form for form in values if form[1] is not None]


def _guided(request: GenerationRequest) -> list[Form]:
    values: list[Form] = [
        ("json_schema", request.guided_json, "guided_json"),
        ("regex", request.guided_regex, "guided_regex"),
        ("choice", request.guided_choice, "guided_choice"),
        ("grammar", request.guided_grammar, "guided_grammar"),
    ]
    return [form for form in values if form[1] is not None]
