"""The part of the OpenAPI page about the Responses API."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from octavo.server.http.errors import RESPONSES
from octavo.server.responses.protocol import DeletedResponse, InputTokens, ItemList, Response, ResponsesRequest

BY_ID = f"{RESPONSES}/{{response_id}}"
INPUT_TOKENS = f"{RESPONSES}/input_tokens"

# The body and the reply, by method and path; examples of the body.
RESPONSES_TYPES: Mapping[tuple[str, str], tuple[type | None, type]] = MappingProxyType(
    {
        ("POST", RESPONSES): (ResponsesRequest, Response),
        ("POST", INPUT_TOKENS): (ResponsesRequest, InputTokens),
        ("GET", BY_ID): (None, Response),
        ("DELETE", BY_ID): (None, DeletedResponse),
        ("POST", f"{BY_ID}/cancel"): (None, Response),
        ("GET", f"{BY_ID}/input_items"): (None, ItemList),
    }
)
RESPONSES_EXAMPLES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        RESPONSES: {
            "text": {"input": "What is a block?", "max_output_tokens": 32},
            "stream": {"input": "What is a block?", "max_output_tokens": 32, "stream": True},
        },
        INPUT_TOKENS: {"text": {"input": "What is a block?"}},
    }
)
