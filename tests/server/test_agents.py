"""Conversations of agents, as they have sent them, request by request, with their texts replaced: Codex 0.171 and
Claude Code 2.1, each with a call of a tool and its result. Both run unchanged against `octavo serve`.
"""

import itertools
import json
from pathlib import Path
from typing import Any

from tests.server import messages_client, responses_client
from tests.server.http_server import HttpServer

RECORDED = Path(__file__).parent / "recorded"
SHORT: dict[str, Any] = {"model": "demo", "temperature": 0}


def replay(server: HttpServer, name: str, field: str, limit: str) -> list[str]:
    """Send the requests of a conversation; return the streams."""
    recorded = json.loads((RECORDED / f"{name}.json").read_text())
    texts = []
    for turn in recorded["turns"]:
        body = recorded["body"] | SHORT | {field: turn, limit: 4}
        with server.client.stream("POST", recorded["path"], json=body, headers=recorded["headers"]) as response:
            texts.append(response.read().decode())
            assert response.status_code == 200, texts[-1]
            assert response.headers["content-type"].startswith("text/event-stream")
    return texts


def check_reuse(counts: list[tuple[int, int]]) -> None:
    """Each request finds nearly all of the one before in the cache; `counts` are of prompt tokens, all and cached."""
    for (before, _), (_, cached) in itertools.pairwise(counts):
        assert cached >= 0.9 * before, counts


def test_codex(server: HttpServer) -> None:
    """A developer speaks again in its third request."""
    texts = replay(server, "codex", "input", "max_output_tokens")
    usages = [responses_client.response_of(responses_client.events_of(text))["usage"] for text in texts]
    check_reuse([(usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]) for usage in usages])


def test_claude_code(server: HttpServer) -> None:
    """A system message stands among its first ones, and its third request has a call that it could not read."""
    texts = replay(server, "claude_code", "messages", "max_tokens")
    usages = [messages_client.message_of(messages_client.events_of(text))["usage"] for text in texts]
    cached = [usage["cache_read_input_tokens"] for usage in usages]
    check_reuse([(usage["input_tokens"] + hit, hit) for usage, hit in zip(usages, cached, strict=True)])
