"""OpenTelemetry: what is sent follows the conventions for servers of generative models, and holds nothing private."""

import ast
import json
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import paclm
from paclm.config import ServerConfig
from paclm.errors import InvalidInput, MissingExtra
from paclm.server import telemetry
from paclm.server.otel import Otel, check_environment, open_otel
from paclm.server.run import serve as serve_workspace
from server.live import bearer, serve
from server.stepped import SteppedEngine, asking, wait_until
from server.test_coarse import clock, pair

__all__ = ["clock", "pair"]

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
COMMON = {"gen_ai.provider.name", "gen_ai.request.model", "gen_ai.operation.name", "server.address", "server.port"}
ANSWERED = COMMON | {
    "gen_ai.response.model",
    "gen_ai.response.finish_reasons",
    "gen_ai.usage.input_tokens",
    "gen_ai.usage.output_tokens",
    "paclm.private_tokens",
    "paclm.public_tokens",
    "paclm.request",
    "http.request.method",
    "http.route",
    "http.response.status_code",
}
METRICS = {
    "gen_ai.server.request.duration": "s",
    "gen_ai.server.time_to_first_token": "s",
    "gen_ai.server.time_per_output_token": "s",
    "gen_ai.client.token.usage": "{token}",
}


class Observed:
    """What a server has sent, kept in memory."""

    def __init__(self):
        self._spans, self._reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.otel = Otel("clinic", "127.0.0.1", [SimpleSpanProcessor(self._spans)], [self._reader])

    @property
    def finished(self):
        return self._spans.get_finished_spans()

    def spans(self, num=1):
        """The spans, once there are so many: some end a moment after the last byte."""
        wait_until(lambda: len(self.finished) >= num)
        return self._spans.get_finished_spans()

    def metrics(self):
        data = self._reader.get_metrics_data()
        scopes = [] if data is None else [scope for found in data.resource_metrics for scope in found.scope_metrics]
        return {metric.name: metric for scope in scopes for metric in scope.metrics}

    def points(self, name):
        return list(self.metrics()[name].data.data_points)

    def everything(self):
        data = self._reader.get_metrics_data()
        return "".join(span.to_json() for span in self._spans.get_finished_spans()) + (data.to_json() if data else "")


@contextmanager
def observing(live):
    observed = Observed()
    live.service.otel = observed.otel
    try:
        yield observed
    finally:
        live.service.otel = None
        observed.otel.close()


def test_a_completion_is_one_span_of_the_callers_trace(shared):
    headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=ZEBRA", "baggage": "patient=ZEBRA"}
    with observing(shared) as observed:
        answer = shared.complete(max_tokens=5, headers=headers)
        shared.http.get("/v1/models", headers=headers)
        shared.http.get("/health", headers=headers)
        (span,) = observed.spans()
        usage = answer.json()["usage"]
        assert (span.name, span.kind, span.status.status_code) == (
            "text_completion clinic",
            SpanKind.SERVER,
            StatusCode.UNSET,
        )
        assert f"{span.context.trace_id:032x}" == TRACE
        assert span.parent is not None
        assert f"{span.parent.span_id:016x}" == PARENT
        found = dict(span.attributes)
        assert set(found) == ANSWERED
        assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert found["gen_ai.usage.output_tokens"] == found["paclm.private_tokens"] == usage["completion_tokens"]
        assert list(found["gen_ai.response.finish_reasons"]) == [answer.json()["choices"][0]["finish_reason"]]
        assert found["paclm.request"] == answer.headers["x-request-id"]
        assert (found["http.route"], found["http.response.status_code"]) == ("/v1/completions", 200)
        assert found["server.port"] == int(shared.url.rpartition(":")[2])
        assert "ZEBRA" not in observed.everything()


def test_metrics_have_the_names_units_buckets_and_counts_of_the_conventions(shared):
    with observing(shared) as observed:
        answers = [shared.complete(max_tokens=n, stream=n == 4, n=1).status_code for n in (1, 4, 6)]
        assert answers == [200] * 3
        spans = observed.spans(3)
        found = observed.metrics()
        assert {name: metric.unit for name, metric in found.items()} == METRICS
        written = sum(span.attributes["gen_ai.usage.output_tokens"] for span in spans)
        by_type = {
            point.attributes["gen_ai.token.type"]: point for point in observed.points("gen_ai.client.token.usage")
        }
        assert (by_type["output"].sum, by_type["output"].count) == (written, 3)
        assert by_type["input"].sum == sum(span.attributes["gen_ai.usage.input_tokens"] for span in spans)
        counts = {}
        for name in METRICS:
            for point in observed.points(name):
                counts[name] = point.count
                extra = set(point.attributes) - COMMON
                assert extra <= {"gen_ai.response.model", "gen_ai.token.type"}
                assert point.attributes["gen_ai.operation.name"] == "text_completion"
        more_than_one = sum(span.attributes["gen_ai.usage.output_tokens"] > 1 for span in spans)
        assert counts["gen_ai.server.request.duration"] == counts["gen_ai.server.time_to_first_token"] == 3
        assert counts["gen_ai.server.time_per_output_token"] == more_than_one >= 1
        (first,) = observed.points("gen_ai.server.time_to_first_token")
        assert (first.explicit_bounds[0], first.explicit_bounds[-1], len(first.explicit_bounds)) == (0.001, 10.0, 16)


def test_chats_and_responses_are_named_chat_and_told_apart_by_their_route(corpus):
    messages = [{"role": "user", "content": "the"}]
    with observing(corpus) as observed:
        corpus.http.post("/v1/chat/completions", json={"model": "clinic", "messages": messages, "max_tokens": 2})
        corpus.http.post("/v1/responses", json={"model": "clinic", "input": "the", "max_output_tokens": 2})
        spans = observed.spans(2)
        assert {span.name for span in spans} == {"chat clinic"}
        assert {span.attributes["http.route"] for span in spans} == {"/v1/chat/completions", "/v1/responses"}


def test_a_refusal_is_named_by_its_code_and_repeats_nothing(shared):
    with observing(shared) as observed:
        shared.complete(model="ZEBRA")
        shared.complete(top_p=0.5)
        shared.complete(headers=bearer("paclm-ZEBRA"))
        shared.http.request("ZEBRA", "/v1/completions")
        shared.complete(headers={"host": "zebra.example"})
        spans = observed.spans(5)
        codes = ["model_not_found", "400", "invalid_api_key", "405", "host_not_allowed"]
        assert [span.attributes["error.type"] for span in spans] == codes
        assert [span.attributes["http.response.status_code"] for span in spans] == [404, 400, 401, 405, 403]
        assert {span.status.status_code for span in spans} == {StatusCode.UNSET}  # none is a fault of the server
        assert {p.attributes["error.type"] for p in observed.points("gen_ai.server.request.duration")} == set(codes)
        assert set(observed.metrics()) == {"gen_ai.server.request.duration"}
        assert "zebra" not in observed.everything().lower()


def test_a_repeated_reply_counts_no_tokens(shared):
    with observing(shared) as observed:
        for _ in range(2):
            shared.complete(max_tokens=3, headers={"idempotency-key": "otel"})
        observed.spans(2)
        assert [point.count for point in observed.points("gen_ai.client.token.usage")] == [1, 1]
        (point,) = observed.points("gen_ai.server.request.duration")
        assert point.count == 2


def test_a_client_that_leaves_and_an_answer_that_is_cut_off_are_errors(make, small_tokenizer):
    engine, settings = SteppedEngine(dissent=0.0), ServerConfig(shutdown_seconds=0.1)
    with (
        serve(make(), engine, small_tokenizer, settings=settings) as live,
        asking(engine) as pool,
        observing(live) as observed,
    ):
        body = {"model": "clinic", "prompt": "the", "max_tokens": 30, "temperature": 0, "stream": True}
        with live.http.stream("POST", "/v1/completions", json=body) as answer:
            engine.let(1)
            next(answer.iter_lines())
        while not observed.finished:  # the step in which the server finds out may not be the next one
            engine.let(1)
            wait_until(lambda: engine.stands or observed.finished)
        engine.stand_still()
        (left,) = observed.spans()
        assert (left.attributes["error.type"], left.status.status_code) == ("client_disconnected", StatusCode.UNSET)
        assert left.attributes["gen_ai.usage.output_tokens"] == live.spent_tokens
        job = pool.submit(live.complete, max_tokens=30, temperature=0)
        engine.let(2)
        engine.wait_until_it_stands()
        live.service.drain()
        wait_until(lambda: live.num_calls == 1)  # the time to end is over, in the middle of a step
        engine.run_free()
        assert job.result(60).json()["error"]["code"] == "answer_cut_off"
        _, cut = observed.spans(2)
        assert (cut.attributes["error.type"], cut.status.status_code) == ("answer_cut_off", StatusCode.ERROR)
        assert "gen_ai.server.time_to_first_token" not in observed.metrics()  # of successful answers only


def counted(observed):
    """All that was sent but durations, times and random ids."""
    random = {"paclm.request", "server.port"}
    spans = [{k: v for k, v in span.attributes.items() if k not in random} for span in observed.spans(6)]
    points = [
        (name, point.count, point.sum if name.endswith("usage") else None, sorted(set(point.attributes.items())))
        for name in METRICS
        for point in observed.points(name)
    ]
    return json.dumps(
        [spans, [(n, c, s, [a for a in attributes if a[0] != "server.port"]) for n, c, s, attributes in points]]
    )


def test_what_is_sent_does_not_show_dissent(pair, monkeypatch):
    """Two servers that differ in dissent alone send the same to every caller; their log lines differ."""
    entries = []
    monkeypatch.setattr(telemetry, "write", lambda entry, level=0: entries.append(entry))
    sent, charged = [], []
    with pair(on_exhausted="refuse") as both:
        for live in both:
            with observing(live) as observed:
                for key in (live.ward, live.admin):
                    live.complete(max_tokens=5, temperature=0, headers=bearer(key))
                    live.complete(max_tokens=5, temperature=0, stream=True, headers=bearer(key))
                    body = {"model": "clinic", "input": "the", "max_output_tokens": 5, "temperature": 0}
                    live.http.post("/v1/responses", json=body, headers=bearer(key))
                sent.append(counted(observed))
            charged.append([entry.charged_nats for entry in entries if entry.event == "answered"])
            entries.clear()
    assert sent[0] == sent[1]
    assert charged[0] != charged[1]  # so the comparison would have seen them


PROMPT = "Mrs Zebedee presents with a cough"


def test_no_text_no_key_and_no_secret_is_sent(start, chat_tokenizer):
    live = start(tokenizer=chat_tokenizer, quota=1000)
    with observing(live) as observed:
        answers = [
            live.complete(prompt=PROMPT, max_tokens=8, stop=["Zebedee"], user="Zebedee").json()["choices"][0]["text"],
            live.http.post(
                "/v1/responses",
                json={"model": "clinic", "input": PROMPT, "instructions": "Zebedee", "max_output_tokens": 8},
            ).json()["output"][0]["content"][0]["text"],
        ]
        live.complete(prompt=PROMPT, max_tokens=200)
        live.complete(prompt=PROMPT, max_tokens=2, headers={"idempotency-key": "Zebedee", "user-agent": "Zebedee/1"})
        observed.spans(4)
        sent = observed.everything()
    hidden = [PROMPT, "Zebedee", live.ward, live.admin, '"ward"', "nats", "mark", "dissent", "disputed", "belief"]
    hidden += [word for answer in answers for word in answer.split() if len(word) > 5]
    assert [word for word in hidden if word in sent] == []
    assert '"gen_ai.usage.output_tokens": 8' in sent


def test_the_libraries_own_telemetry_is_off(shared, monkeypatch):
    """FastAPI would send queries, and the messages of errors, to any provider that the process has."""
    spans = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: provider)
    shared.http.post("/v1/completions?text=ZEBRA", json={"model": "clinic", "prompt": "the", "max_tokens": 1})
    assert spans.get_finished_spans() == ()


def test_nothing_is_traced_and_nothing_imported_unless_it_is_asked_for(shared):
    assert ServerConfig().otel is False
    assert shared.service.otel is None
    for path in (Path(paclm.__file__).parent / "server").glob("*.py"):
        if path.name == "otel.py":
            continue
        for node in ast.parse(path.read_text()).body:  # at the top of a module: imported with it
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = getattr(node, "module", None) or ""
            assert not any("otel" in name or "opentelemetry" in name for name in [module, *names]), path


class Collector(BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def collector():
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        server.received = []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def use(collector, monkeypatch):
    for name in ("OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")


def spans_of(received):
    requests = [ExportTraceServiceRequest.FromString(body) for path, body in received if path == "/v1/traces"]
    found = [resource for request in requests for resource in request.resource_spans]
    names = [a.value.string_value for r in found for a in r.resource.attributes if a.key == "service.name"]
    return names, [span for resource in found for scope in resource.scope_spans for span in scope.spans]


@pytest.mark.parametrize("service_name", [None, "clinic-7"])
def test_a_collector_receives_spans_and_metrics_by_the_standard_variables(shared, collector, monkeypatch, service_name):
    use(collector, monkeypatch)
    if service_name is not None:
        monkeypatch.setenv("OTEL_SERVICE_NAME", service_name)
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    shared.service.otel = otel = open_otel("clinic", "127.0.0.1")
    try:
        text = shared.complete(prompt=PROMPT, max_tokens=6).json()["choices"][0]["text"]
        wait_until(lambda: shared.service.is_idle)
    finally:
        shared.service.otel = None
        otel.close()
    names, spans = spans_of(collector.received)
    assert (names, [span.name for span in spans]) == ([service_name or "paclm"], ["text_completion clinic"])
    measured = [
        metric.name
        for path, body in collector.received
        if path == "/v1/metrics"
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    ]
    assert set(measured) == (set() if service_name else set(METRICS))
    raw = b"".join(body for _, body in collector.received)
    assert text.strip().encode() not in raw
    assert b"Zebedee" not in raw


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "http/json"),
        ("OTEL_TRACES_EXPORTER", "console"),
    ],
)
def test_what_the_variables_ask_for_and_is_not_offered_is_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInput, match=name):
        check_environment()


def test_serving_without_the_packages_says_which_extra_to_install(make, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("paclm.server.otel")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("paclm.server.otel")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(MissingExtra, match=r"\[otel\]"):
        serve_workspace(make().path, ServerConfig(otel=True, port=0), print, print)


@pytest.mark.stress
def test_a_server_sends_its_telemetry_and_ends_where_no_collector_listens(make, collector, monkeypatch):
    from server.killing import serve_process

    use(collector, monkeypatch)
    workspace = make(per_token="2^-16", total="2^-2")
    settings = workspace.path / "paclm.toml"
    settings.write_text(settings.read_text() + "\n[server]\notel = true\n")
    key = None
    for endpoint in (None, "http://127.0.0.1:9"):  # nothing listens at the second
        if endpoint is not None:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        process, url, key = serve_process(workspace.path, key)
        body = {"model": workspace.path.name, "prompt": PROMPT, "max_tokens": 4}
        assert httpx.post(f"{url}/v1/completions", json=body, headers=bearer(key), timeout=60).status_code == 200
        process.terminate()
        assert process.wait(60) == 0
    _, spans = spans_of(collector.received)
    assert [span.name for span in spans] == [f"text_completion {workspace.path.name}"]
