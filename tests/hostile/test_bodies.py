"""Bodies that are no JSON, too much of it, or not what their headers say."""

import json
import random

import pytest
from tests.breadth import each
from tests.hostile.conftest import MAX_BODY_BYTES
from tests.hostile.wire import CHAT, QUESTION, SMALL, TEXT, connect, post_bytes, read_answer, refusal
from tests.server.http_server import HttpServer

DEPTH = 100_000
VALID = json.dumps(SMALL).encode()


def answer_to(server: HttpServer, message: bytes) -> tuple[int, bytes]:
    with connect(server) as connection:
        connection.sendall(message)
        return read_answer(connection)


def messages_then(name: str, value: bytes) -> bytes:
    return b'{"messages": %b, "max_tokens": 1, "%b": %b}' % (json.dumps(QUESTION).encode(), name.encode(), value)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b"nul",
        VALID[:-1],
        VALID + b"{}",
        VALID.replace(b"Octavo", b"\xff\xfe"),
        VALID.decode().encode("utf-16"),
        messages_then("n", b"NaN"),
        messages_then("temperature", b"-Infinity"),
        messages_then("stop", b'"\\ud800"'),
        VALID.replace(b"Octavo", b"\\ud800"),
        b"[" * DEPTH,
        b"[" * DEPTH + b"]" * DEPTH,
        b'{"a":' * DEPTH + b"1" + b"}" * DEPTH,
        messages_then("no_such_field", b"[" * DEPTH + b"]" * DEPTH),
        messages_then("response_format", b'{"type": "json_object", "x": ' + b"[" * DEPTH + b"]" * DEPTH + b"}"),
        messages_then("chat_template_kwargs", b'{"x": ' * DEPTH + b"1" + b"}" * DEPTH),
    ],
)
def test_not_a_request(server: HttpServer, body: bytes) -> None:
    for path in (CHAT, TEXT, "/tokenize"):
        refusal(*answer_to(server, post_bytes(body, path)), 400)


@pytest.mark.parametrize("body", [messages_then("seed", b"9" * 5000), messages_then("n", b"1e99999")])
def test_a_number_out_of_this_world(server: HttpServer, body: bytes) -> None:
    refusal(*answer_to(server, post_bytes(body)), 400)


def test_twice_the_same_key_is_no_trouble(server: HttpServer) -> None:
    assert answer_to(server, post_bytes(messages_then("max_tokens", b"2")))[0] == 200


@each("seed", range(30))
def test_a_request_with_bytes_changed(server: HttpServer, seed: int) -> None:
    source = random.Random(seed)
    body = bytearray(VALID)
    for _ in range(source.randint(1, 8)):
        body[source.randrange(len(body))] = source.randrange(256)
    status, answer = answer_to(server, post_bytes(bytes(body)))
    assert status == 200 or refusal(status, answer, 400)


def test_too_large(server: HttpServer) -> None:
    whole = messages_then("user", b'"' + b"x" * MAX_BODY_BYTES + b'"')
    refusal(*answer_to(server, post_bytes(whole)), 413)


def test_50_megabytes_announced_and_never_sent(server: HttpServer) -> None:
    head = post_bytes(b"").replace(b"Content-Length: 0", b"Content-Length: 52428800")
    refusal(*answer_to(server, head), 413)


def test_50_megabytes_in_chunks(server: HttpServer) -> None:
    head = post_bytes(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    with connect(server) as connection:
        connection.sendall(head)
        try:
            for _ in range(800):
                connection.sendall(chunk)
        except (BrokenPipeError, ConnectionResetError):
            return  # it hung up on us, as it may
        refusal(*read_answer(connection), 413)


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded"])
def test_another_type_of_content(server: HttpServer, kind: str) -> None:
    message = post_bytes(VALID).replace(b"application/json", kind.encode())
    refusal(*answer_to(server, message), 415)


@pytest.mark.parametrize(
    "message",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_not_http(server: HttpServer, message: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(message)
        status, _ = read_answer(connection)
    assert status in (0, 400, 408, 505)


@pytest.mark.parametrize("head", [b"X-Long: " + b"a" * 200_000, b"\r\n".join(b"X-%d: y" % i for i in range(20_000))])
def test_too_long_a_head(server: HttpServer, head: bytes) -> None:
    with connect(server) as connection:
        try:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError):
            return
        status, _ = read_answer(connection)
    assert status in (0, 431)


@each("path", ["/" + "a" * 20_000, "/%00", "/v1/models/" + "../" * 50, "/v1/models/%ff%fe", "//", "/\u00e9"])
@each("method", ["GET", "POST", "DELETE", "OPTIONS", "BREW"])
def test_odd_routes(server: HttpServer, method: str, path: str) -> None:
    request = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
    status, _ = answer_to(server, request)
    assert status in (0, 400, 404, 405, 414) or (status == 200 and path == "//")  # which means "/", a page
