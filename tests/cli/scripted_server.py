"""A server with the OpenAI API that says what a test tells it to, and remembers what it was asked."""

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]


class ScriptedServer(ThreadingHTTPServer):
    """Answers each POST by what `script` makes of its body: pieces of a stream, or an `Answer`."""

    daemon_threads = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script: Callable[[Body], Iterator[bytes] | Answer] = lambda body: tokens(body["max_tokens"])
        self.models = Answer(200, {"data": [{"id": "first"}, {"id": "second"}]})
        self.asked: list[Body] = []
        self.headers: list[Mapping[str, str]] = []
        self.connections: list[socket.socket] = []
        self.client_left = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer:
    """A whole answer."""

    def __init__(self, status: int, body: object) -> None:
        self.status = status
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ScriptedServer

    def setup(self) -> None:
        super().setup()
        self.server.connections.append(self.connection)

    def do_GET(self) -> None:
        self._answer(self.server.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append({"path": self.path, **body})
        self.server.headers.append(dict(self.headers))
        answer = self.server.script(body)
        if isinstance(answer, Answer):
            self._answer(answer)
        else:
            self._stream(answer)

    def _answer(self, answer: Answer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def _stream(self, pieces: Iterator[bytes]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for piece in pieces:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError):
            self.server.client_left.set()
            self.close_connection = True
        except HangUpError:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a test's output is for its failures."""


class HangUpError(Exception):
    """Raised by a script that ends the connection in the middle of a stream."""


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        for connection in server.connections:
            with suppress(OSError):  # those that are closed already
                connection.shutdown(socket.SHUT_RDWR)
        server.server_close()
        thread.join()


def event(data: object) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def said(text: str, **delta: str) -> bytes:
    """A chunk of a chat."""
    return event({"choices": [{"index": 0, "delta": {"content": text, **delta}, "finish_reason": None}]})


def tokens(count: int, prompt_tokens: int = 7) -> Iterator[bytes]:
    """A completion of so many one-token chunks."""
    for number in range(count):
        yield event({"choices": [{"index": 0, "text": f" {number}", "finish_reason": None}], "usage": None})
    yield event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": None})
    yield event({"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": count}})
    yield event(b"[DONE]")
