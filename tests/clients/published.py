"""OpenAI's published description of its answers, as a judge of ours: nothing missing, nothing of another type, and
nothing beside what is published but the extras listed here."""

import json
from pathlib import Path
from typing import Any

import jsonschema

# What clients of open models read beside OpenAI's fields.
EXTRAS = {
    "reasoning", "reasoning_content", "stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs", "metrics",
    "max_model_len", "root", "parent", "permission", "prompt_text", "timings", "models", "state",
}  # fmt: skip

# Where OpenAI's own server departs from its description: the usage of all chunks but the last, the reason of all
# chunks of a completion but the last, the logprob of a first token that nothing precedes.
NULLABLE = {"usage", "finish_reason", "token_logprobs", "top_logprobs", "system_fingerprint", "service_tier"}


def check(kind: str, answer: Any) -> None:
    """Hold an answer to the description of its kind.

    Raises:
        jsonschema.ValidationError: naming the place.
    """
    jsonschema.Draft202012Validator({**SCHEMAS, "$ref": f"#/$defs/{kind}"}).validate(answer)


def _close(schema: Any, name: str = "") -> Any:
    """Refuse unknown properties wherever properties are listed, and allow the departures."""
    if isinstance(schema, list):
        return [_close(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _close(value) for key, value in schema.items() if key != "properties"}
    if "properties" in schema:
        closed["properties"] = {key: _close(value, key) for key, value in schema["properties"].items()}
        closed["properties"] |= dict.fromkeys(EXTRAS - set(schema["properties"]), True)
        closed["additionalProperties"] = False
    if name in NULLABLE:
        if "items" in closed:
            closed["items"] = {"anyOf": [closed["items"], {"type": "null"}]}
        closed = {"anyOf": [closed, {"type": "null"}]}
    return closed


SCHEMAS: dict[str, Any] = {
    "$defs": {
        name: _close(schema)
        for name, schema in json.loads(Path(__file__).with_name("openai_schemas.json").read_text())["$defs"].items()
    }
}
