"""Traces for OpenTelemetry: what each request waited for, by phase. Set by OpenTelemetry's own environment variables.

A span of the HTTP exchange, whose parent is the one that the client's `traceparent` names; below it a span for each
prompt with the names of the GenAI conventions, made of `queue`, `prefill` and `decode`. Spans of requests are made when
they have ended, from the times that are known anyway. Without the variables nothing is imported.

Sources: the OpenTelemetry specification, "SDK environment variables" and "OTLP exporter"; its semantic conventions for
GenAI spans and for HTTP server spans; W3C Trace Context.
"""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from octavo._version import __version__
from octavo.errors import InvalidParameterError
from octavo.server.http.exchange import COMPUTED, Exchange, route_path

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from octavo.engine.output_processor import RequestState
    from octavo.outputs import RequestMetrics

_DISABLED, _EXPORTER = "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"
_EXPORTERS = ("otlp", "console", "none")
_OPERATION = "octavo.operation"  # key of OpenTelemetry's context
# Of a route, by what is in its path; `generate_content` is what the conventions call any other.
_OPERATIONS = {
    "embed": "embeddings", "chat": "chat", "messages": "chat", "responses": "chat", "completions": "text_completion",
}  # fmt: skip
_ANY_OPERATION = "generate_content"
_NS = 10**9


def exporters_wanted(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the exporters that the environment asks for; none: no traces.

    Raises InvalidParameterError: an exporter or a protocol that is not offered.
    """
    if environ.get(_DISABLED, "").strip().lower() == "true":
        return ()
    has_endpoint = any(environ.get(name) for name in _ENDPOINTS)
    names = environ.get(_EXPORTER, "").strip() or ("otlp" if has_endpoint else "none")
    wanted = tuple(dict.fromkeys(name.strip() for name in names.split(",")))
    for name in wanted:
        if name not in _EXPORTERS:
            raise InvalidParameterError(_EXPORTER, name, "one of " + ", ".join(_EXPORTERS))
    for variable in _PROTOCOLS:
        if "otlp" in wanted and environ.get(variable, _PROTOCOL) != _PROTOCOL:
            raise InvalidParameterError(variable, environ[variable], f"{_PROTOCOL} is what Octavo sends (port 4318)")
    return tuple(name for name in wanted if name != "none")


@contextmanager
def tracing(model_name: str, environ: Mapping[str, str] = os.environ) -> "Generator[Tracing | None, None, None]":
    """Yield what makes spans, and send the last ones in the end; None if the environment asks for none.

    Raises InvalidParameterError: as `exporters_wanted`, or OpenTelemetry is not installed.
    """
    wanted = exporters_wanted(environ)
    if not wanted:
        yield None
        return
    provider = _provider(wanted)
    try:
        yield Tracing(provider, model_name)
    finally:
        provider.shutdown()


def _provider(wanted: tuple[str, ...]) -> "TracerProvider":
    """Return OpenTelemetry's SDK with these exporters. Other variables it reads itself: sampler, headers, limits."""
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        limit = "traces need OpenTelemetry: pip install 'octavo[otel]'"
        raise InvalidParameterError(_EXPORTER, ",".join(wanted), limit) from error
    named = {} if _service_is_named() else {"service.name": "octavo"}
    provider = TracerProvider(resource=Resource.create({"service.version": __version__, **named}))
    for name in wanted:
        provider.add_span_processor(BatchSpanProcessor(_exporter(name)))
    return provider


def _service_is_named() -> bool:
    return bool(os.environ.get("OTEL_SERVICE_NAME")) or "service.name=" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )


def _exporter(name: str) -> "SpanExporter":
    if name == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        limit = "sending traces needs OTLP's exporter: pip install 'octavo[otel]'"
        raise InvalidParameterError(_EXPORTER, name, limit) from error
    return OTLPSpanExporter()


class Tracing:
    """Makes spans of requests: a `RequestObserver` of the engine."""

    def __init__(self, provider: "TracerProvider", model_name: str) -> None:
        self._tracer, self._model_name = provider.get_tracer("octavo", __version__), model_name

    def began(self) -> object:
        """Return the context that a request comes from: that of its HTTP exchange."""
        from opentelemetry import context

        return context.get_current()

    def ended(self, state: "RequestState") -> None:
        """Make the spans of a request that has ended."""
        from opentelemetry import context, trace

        origin: Context = state.origin if isinstance(state.origin, context.Context) else context.Context()
        times = state.times()
        ended_s = times.finished_time_s or times.arrival_time_s
        operation = "embeddings" if state.processed.pooling is not None else context.get_value(_OPERATION, origin)
        attributes = {"gen_ai.operation.name": operation or _ANY_OPERATION, **self._attributes(state, times)}
        name = f"{attributes['gen_ai.operation.name']} {attributes['gen_ai.request.model']}"
        span = self._tracer.start_span(name, origin, start_time=_ns(times.arrival_time_s), attributes=attributes)
        if (error := next((sample.error for sample in state.samples if sample.error is not None), None)) is not None:
            span.set_status(trace.StatusCode.ERROR, error)
        inside = trace.set_span_in_context(span, origin)
        for phase, start_s, end_s in phases(times):
            self._tracer.start_span(phase, inside, start_time=_ns(start_s)).end(_ns(end_s))
        span.end(_ns(max(ended_s, times.arrival_time_s)))

    def _attributes(self, state: "RequestState", times: "RequestMetrics") -> dict[str, Any]:
        params, adapter = state.processed.params, state.request.adapter
        model = self._model_name if adapter is None else adapter.name
        attributes: dict[str, Any] = {
            "gen_ai.provider.name": "octavo",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.usage.input_tokens": state.num_prompt_tokens,
            "gen_ai.usage.output_tokens": state.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": state.num_cached_tokens,
            "octavo.num_preemptions": times.num_preemptions,
            "octavo.num_accepted_drafts": times.num_accepted_drafts,
        }
        if state.processed.pooling is not None:
            return attributes
        return attributes | {
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.seed": str(params.seed),  # of 64 bits, where OpenTelemetry's integers have a sign
            "gen_ai.request.choice.count": params.n,
            "gen_ai.response.finish_reasons": [sample.finish_reason or "" for sample in state.samples],
        }


def phases(times: "RequestMetrics") -> list[tuple[str, float, float]]:
    """Return name, start and end, in seconds of the wall clock, of each phase that a request got to.

    A clock that was set back makes none of them negative.
    """
    ended_s = times.finished_time_s or times.arrival_time_s
    started_s, first_s = times.first_scheduled_time_s, times.first_token_time_s
    bounds = [times.arrival_time_s]
    bounds += [end_s for end_s in (started_s, first_s) if end_s is not None]
    bounds.append(ended_s)
    for at in range(1, len(bounds)):
        bounds[at] = max(bounds[at], bounds[at - 1])
    names = ("queue", "prefill", "decode")[: len(bounds) - 1]
    return list(zip(names, bounds, bounds[1:], strict=False))


class TracingMiddleware:
    """The outermost layer where requests are traced: makes the span of each exchange that makes the engine compute.

    The response has the span as its `traceparent`, the access log its trace as `trace_id`.
    """

    def __init__(self, app: "ASGIApp", tracing: Tracing) -> None:
        self._app, self._tracer = app, tracing._tracer

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not _is_computed(scope["path"]):
            await self._app(scope, receive, send)
            return
        from opentelemetry import context, propagate, trace

        sent = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        origin = context.set_value(_OPERATION, operation_of(scope["path"]), propagate.extract(sent, context.Context()))
        span = self._tracer.start_span(f"POST {scope['path']}", origin, kind=trace.SpanKind.SERVER)
        token = context.attach(trace.set_span_in_context(span, origin))
        passed_on: dict[str, str] = {}
        propagate.inject(passed_on)
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in passed_on.items()]

        async def send_with_trace(message: "Message") -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            await send(message)

        scope.setdefault("state", {})["trace_id"] = trace.format_trace_id(span.get_span_context().trace_id)
        try:
            await self._app(scope, receive, send_with_trace)
        finally:
            context.detach(token)
            exchange = Exchange.in_scope(scope)
            span.set_attributes(
                {
                    "http.request.method": "POST",
                    "url.path": route_path(scope),
                    "octavo.request_id": exchange.request_id,
                    "octavo.client_left": exchange.was_abandoned,
                }
            )
            if exchange.status is not None:
                span.set_attribute("http.response.status_code", exchange.status)
            if (route := getattr(scope.get("route"), "path", None)) is not None:
                span.set_attribute("http.route", route)
                span.update_name(f"POST {route}")
            if (exchange.status or 0) >= 500:
                span.set_status(trace.StatusCode.ERROR)
            span.end()


def operation_of(path: str) -> str:
    """Return the GenAI operation of a route."""
    return next((operation for part, operation in _OPERATIONS.items() if part in path), _ANY_OPERATION)


def _is_computed(path: str) -> bool:
    return any(prefix in path for prefix in COMPUTED) or operation_of(path) != _ANY_OPERATION


def _ns(seconds: float) -> int:
    return int(seconds * _NS)
