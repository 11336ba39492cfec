"""OpenTelemetry: a span for each request that asks for an answer, and the metrics `gen_ai.server.*`. Off by default.

What is sent are counts, durations, ids made by this server and words of fixed lists. Of a request's headers only
`traceparent` is read, which consists of hexadecimal digits. No prompt, answer, API key or name of a key gets in, and of
a request's `Entry` neither the charge nor anything else that counts dissent. Importing this needs the extra `otel`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence

from starlette.datastructures import Headers
from starlette.types import Scope

from paclm import __version__
from paclm.errors import InvalidInput, MissingExtra
from paclm.server.telemetry import Entry, Route

try:
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.metrics import Histogram
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import Span, SpanKind, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError:
    raise MissingExtra("opentelemetry") from None

OPERATIONS: dict[Route, str] = {"completions": "text_completion", "chat": "chat", "responses": "chat"}
"""Routes that are traced, and what the conventions call them."""
_CLOSE_SECONDS = 5.0
"""For the last export: a collector that does not answer must not hold up the end of the server."""
_DURATIONS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS = tuple(4**power for power in range(14))

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
"""Others are sent as `_OTHER`: clients may invent them."""

Attributes = Mapping[str, str | int | Sequence[str]]


def check_environment() -> None:
    """Raise if the OTEL_* variables ask for something that is not offered."""
    for name, offered in (
        ("OTEL_TRACES_EXPORTER", ("otlp", "none")),
        ("OTEL_METRICS_EXPORTER", ("otlp", "none")),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", ("http/protobuf",)),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", ("http/protobuf",)),
        ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", ("http/protobuf",)),
    ):
        if (value := os.environ.get(name)) and value not in offered:
            raise InvalidInput(f"{name} is {value!r}, and paclm offers {' or '.join(offered)}. Change or unset it.")


def open_otel(model_id: str, host: str) -> Otel:
    """Export to the collector that the OTEL_* variables name; by default to this machine's port 4318."""
    check_environment()
    processors: list[SpanProcessor] = []
    readers: list[MetricReader] = []
    if os.environ.get("OTEL_TRACES_EXPORTER") != "none":
        processors.append(BatchSpanProcessor(OTLPSpanExporter()))
    if os.environ.get("OTEL_METRICS_EXPORTER") != "none":
        readers.append(PeriodicExportingMetricReader(OTLPMetricExporter()))
    return Otel(model_id, host, processors, readers)


class Otel:
    """Has providers of its own and sets no global ones: nothing but this module is traced."""

    def __init__(
        self, model_id: str, host: str, processors: Sequence[SpanProcessor], readers: Sequence[MetricReader]
    ) -> None:
        own = Resource.create({"service.name": "paclm", "service.version": __version__})
        resource = own.merge(OTELResourceDetector().detect())  # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
        self._spans = TracerProvider(resource=resource, shutdown_on_exit=False)
        for processor in processors:
            self._spans.add_span_processor(processor)
        self._metrics = MeterProvider(readers, resource, shutdown_on_exit=False)
        self._tracer = self._spans.get_tracer("paclm", __version__)
        self._model = {"gen_ai.provider.name": "paclm", "gen_ai.request.model": model_id}
        self.model_id = model_id
        self._host = host
        meter = self._metrics.get_meter("paclm", __version__)

        def histogram(name: str, unit: str, about: str, bounds: Sequence[float]) -> Histogram:
            return meter.create_histogram(name, unit, about, explicit_bucket_boundaries_advisory=bounds)

        self.duration = histogram(
            "gen_ai.server.request.duration", "s", "From request to last output token.", _DURATIONS
        )
        first, per_token = "From request to first token.", "Seconds per token after the first."
        self.first_token = histogram("gen_ai.server.time_to_first_token", "s", first, _FIRST_TOKEN)
        self.per_token = histogram("gen_ai.server.time_per_output_token", "s", per_token, _PER_TOKEN)
        self.tokens = histogram("gen_ai.client.token.usage", "{token}", "Tokens read and written.", _TOKENS)

    def begin(self, route: Route, scope: Scope) -> Trace | None:
        """Start the span of a request; None if it does not ask for an answer."""
        operation = OPERATIONS.get(route)
        if operation is None:
            return None
        _, port = scope.get("server") or ("", 0)
        method = scope["method"] if scope["method"] in _METHODS else "_OTHER"
        common = {**self._model, "gen_ai.operation.name": operation, "server.address": self._host, "server.port": port}
        span = self._tracer.start_span(
            f"{operation} {self.model_id}",
            _parent(Headers(scope=scope)),
            SpanKind.SERVER,
            {**common, "http.request.method": method, "http.route": scope["path"]},  # the path is one of three
        )
        return Trace(self, span, common)

    def close(self) -> None:
        """Send what is left."""

        def shut_down() -> None:
            self._spans.shutdown()
            self._metrics.shutdown()

        closing = threading.Thread(target=shut_down, name="otel", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)


class Trace:
    """One request. An `Answer` that was admitted ends it; the end of the response does otherwise."""

    def __init__(self, otel: Otel, span: Span, common: Attributes) -> None:
        self._otel = otel
        self._span = span
        self._common = common
        self._started = time.perf_counter()
        self.has_answer = False
        """Whether an `Answer` ends it."""
        self.error: str | None = None
        """The code of a refusal; without one its status is taken."""
        self._has_ended = False

    def responded(self, status: int) -> None:
        """The response was sent; the end, unless there is an answer."""
        if not self.has_answer:
            self._end(status, self.error or (str(status) if status >= 400 else None), {})

    def answered(self, entry: Entry, finish_reasons: Sequence[str | None]) -> None:
        """The answer has ended as its line in the log says; of that only counts and durations are taken."""
        otel, answer = self._otel, {**self._common, "gen_ai.response.model": self._otel.model_id}
        private, public, prompt = entry.private_tokens or 0, entry.public_tokens or 0, entry.prompt_tokens or 0
        error = "client_disconnected" if entry.event == "disconnected" else entry.code
        otel.tokens.record(prompt, {**answer, "gen_ai.token.type": "input"})
        otel.tokens.record(private + public, {**answer, "gen_ai.token.type": "output"})
        if error is None and entry.first_token_seconds is not None and entry.seconds is not None:
            otel.first_token.record(entry.first_token_seconds, answer)
            if (later := private + public - 1) > 0:
                otel.per_token.record((entry.seconds - entry.first_token_seconds) / later, answer)
        counts: Attributes = {
            "gen_ai.response.model": otel.model_id,
            "gen_ai.response.finish_reasons": [reason or "error" for reason in finish_reasons],
            "gen_ai.usage.input_tokens": prompt,
            "gen_ai.usage.output_tokens": private + public,
            "paclm.private_tokens": private,
            "paclm.public_tokens": public,
            "paclm.request": entry.request or "",
        }
        self._end(entry.status, error, counts)

    def _end(self, status: int | None, error: str | None, counts: Attributes) -> None:
        if self._has_ended:  # the client left before its answer was admitted
            return
        self._has_ended = True
        failed = {} if error is None else {"error.type": error}
        seconds = time.perf_counter() - self._started
        self._otel.duration.record(seconds, {**self._common, **failed})
        self._span.set_attributes({**counts, **failed})
        if status is not None:
            self._span.set_attribute("http.response.status_code", status)
        if error not in (None, "client_disconnected") and (status is None or status >= 500):
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


def _parent(headers: Headers) -> Context:
    """The caller's span. Its `tracestate` is left out, because that may be any text."""
    found = headers.getlist("traceparent")
    return TraceContextTextMapPropagator().extract({"traceparent": found[0]} if len(found) == 1 else {}, Context())
