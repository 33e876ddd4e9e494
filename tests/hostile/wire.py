"""Requests as no HTTP library would send them, and what every refusal must look like."""

import json
import socket
from typing import Any
from urllib.parse import urlsplit

from tests.server.http_server import HttpServer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
QUESTION = [{"role": "user", "content": "What is Octavo?"}]
SMALL = {"messages": QUESTION, "max_tokens": 1, "temperature": 0}
LONG = {"messages": QUESTION, "max_tokens": 1500, "ignore_eos": True, "temperature": 0, "stream": True}


def connect(server: HttpServer) -> socket.socket:
    parts = urlsplit(server.url)
    return socket.create_connection((str(parts.hostname), int(parts.port or 80)), timeout=30)


def post_bytes(body: bytes, path: str = CHAT, *headers: str) -> bytes:
    """A whole request, its body as it is."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def read_answer(connection: socket.socket) -> tuple[int, bytes]:
    """Return status and body of the next answer; status 0 where the connection ended without one."""
    received = b""
    while b"\r\n\r\n" not in received:
        piece = _receive(connection)
        if not piece:
            return 0, received
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    lengths = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    while lengths and len(body) < lengths[0] and (piece := _receive(connection)):
        body += piece
    return int(head.split(b" ")[1]), body


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65536)
    except ConnectionResetError:
        return b""


def refusal(status: int, body: bytes | str, wanted: int) -> dict[str, Any]:
    """Return the error of an answer, which must have the API's shape and tell nothing of our insides."""
    assert status == wanted, (status, body[:500])
    answer = json.loads(body)
    error: dict[str, Any] = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    text = json.dumps(answer)
    assert not any(inside in text for inside in ("Traceback", ".py", "site-packages", "object at 0x"))
    return error
