"""Traces arrive at a collector; without the variables nothing of OpenTelemetry is imported."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from tests.server.http_server import HttpServer

from octavo.errors import InvalidParameterError
from octavo.outputs import RequestMetrics
from octavo.server.tracing import exporters_wanted, operation_of, phases

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(ThreadingHTTPServer):
    """Takes spans over OTLP/HTTP, as protobuf."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self.changed = threading.Condition()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def wait_for(self, count: int) -> list[Any]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.spans) >= count, timeout=30), [s.name for s in self.spans]
            return list(self.spans)


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        assert self.path == "/v1/traces"
        sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.changed:
            for resource in sent.resource_spans:
                self.server.resources.append(attributes_of(resource.resource))
                self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
            self.server.changed.notify_all()
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def attributes_of(item: Any) -> dict[str, Any]:
    def value(one: Any) -> Any:
        kind = one.WhichOneof("value")
        return [value(each) for each in one.array_value.values] if kind == "array_value" else getattr(one, kind)

    return {each.key: value(each.value) for each in item.attributes}


def test_a_streamed_chat_is_a_tree_of_spans() -> None:
    with collector() as sink:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": sink.url, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "seed": 5, "stream": True}
        with HttpServer("--log-format", "json", has_model=False, environ=environ) as server:
            sent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            response = server.client.post("/v1/chat/completions", json=body, headers=sent)
            spans = sink.wait_for(5)
            server.client.get("/health")
            log = server.log
    assert "[DONE]" in response.text
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    by_name = {span.name: span for span in spans}
    http, request = by_name["POST /v1/chat/completions"], by_name["chat demo"]
    assert set(by_name) == {http.name, request.name, "queue", "prefill", "decode"}
    assert http.parent_span_id.hex() == PARENT
    assert request.parent_span_id == http.span_id
    phases = [by_name[name] for name in ("queue", "prefill", "decode")]
    assert {span.parent_span_id for span in phases} == {request.span_id}
    assert phases[0].start_time_unix_nano == request.start_time_unix_nano
    assert [span.end_time_unix_nano for span in phases[:-1]] == [span.start_time_unix_nano for span in phases[1:]]
    assert phases[-1].end_time_unix_nano == request.end_time_unix_nano <= http.end_time_unix_nano
    known = attributes_of(request)
    assert known["gen_ai.operation.name"] == "chat"
    assert known["gen_ai.request.model"] == "demo"
    assert known["gen_ai.request.max_tokens"] == known["gen_ai.usage.output_tokens"] == 4
    assert known["gen_ai.request.seed"] == "5"
    assert known["gen_ai.response.finish_reasons"] == ["length"]
    assert attributes_of(http)["http.response.status_code"] == 200
    assert attributes_of(http)["octavo.request_id"] == response.headers["x-request-id"]
    assert response.headers["traceparent"] == f"00-{TRACE}-{http.span_id.hex()}-01"
    assert f'"trace_id":"{TRACE}"' in log
    assert sink.resources[0]["service.name"] == "octavo"


@pytest.mark.full
def test_an_error_is_a_span_that_says_so() -> None:
    """Without a parent it begins a trace; what the engine has not seen has no span of a request."""
    with collector() as sink:
        environ = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{sink.url}/v1/traces", "OTEL_SERVICE_NAME": "mine"}
        with HttpServer(has_model=False, environ=environ) as server:
            assert server.client.post("/v1/completions", json={"prompt": 1.5}).status_code == 400
            server.process.terminate()  # what is left is sent at the end
            server.process.wait()
        [span] = sink.wait_for(1)
    assert (span.name, span.parent_span_id) == ("POST /v1/completions", b"")
    assert attributes_of(span)["http.response.status_code"] == 400
    assert sink.resources[0]["service.name"] == "mine"


def test_nothing_is_imported_where_traces_are_off() -> None:
    """But for the API alone, by FastAPI, if it is installed."""
    program = (
        "import sys, octavo.server.app\n"
        "from octavo.server.tracing import tracing\n"
        "with tracing('m', {'OTEL_SDK_DISABLED': 'true', 'OTEL_EXPORTER_OTLP_ENDPOINT': 'http://x'}) as none: pass\n"
        "parts = ('opentelemetry.sdk', 'opentelemetry.exporter')\n"
        "print(none, [name for name in sys.modules if name.startswith(parts)])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "None []\n"


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, ()),
        ({"OTEL_SERVICE_NAME": "x"}, ()),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, ("otlp",)),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, ("otlp",)),
        ({"OTEL_TRACES_EXPORTER": "otlp, console"}, ("otlp", "console")),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, ()),
        ({"OTEL_SDK_DISABLED": "TRUE", "OTEL_TRACES_EXPORTER": "otlp"}, ()),
    ],
)
def test_the_environment_decides(environ: dict[str, str], wanted: tuple[str, ...]) -> None:
    assert exporters_wanted(environ) == wanted


@pytest.mark.parametrize(
    "environ",
    [
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
    ],
)
def test_what_is_not_offered_is_an_error(environ: dict[str, str]) -> None:
    with pytest.raises(InvalidParameterError, match="OTEL_"):
        exporters_wanted(environ)


def test_phases_end_where_the_request_did() -> None:
    whole = RequestMetrics(arrival_time_s=1, first_scheduled_time_s=2, first_token_time_s=3, finished_time_s=5)
    assert phases(whole) == [("queue", 1, 2), ("prefill", 2, 3), ("decode", 3, 5)]
    assert phases(RequestMetrics(arrival_time_s=1, finished_time_s=4)) == [("queue", 1, 4)]
    cut = RequestMetrics(arrival_time_s=1, first_scheduled_time_s=2, finished_time_s=4)
    assert phases(cut) == [("queue", 1, 2), ("prefill", 2, 4)]
    set_back = RequestMetrics(arrival_time_s=9, first_scheduled_time_s=2, first_token_time_s=3, finished_time_s=4)
    assert phases(set_back) == [("queue", 9, 9), ("prefill", 9, 9), ("decode", 9, 9)]


def test_operations_of_routes() -> None:
    routes = ("/v1/chat/completions", "/v1/messages", "/v1/completions", "/api/embed", "/v1/rerank")
    assert [operation_of(route) for route in routes] == [
        "chat", "chat", "text_completion", "embeddings", "generate_content"
    ]  # fmt: skip
