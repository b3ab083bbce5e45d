"""Metrics for Prometheus and OTLP, and the dashboard and rules that use them."""

from __future__ import annotations

import http.server
import json
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from contracts.traces import build_traceparent
from jobs.models import Attempt, Job, Member
from jobs.operations.metrics import collection as collection
from jobs.operations.metrics.collection import FAMILIES, GPU_METRICS, RANK_BYTES, RANK_STEP, collect_metrics
from jobs.operations.metrics.export import OtlpExporter
from jobs.queue.hosts.presentation import CONTACT_STATES
from jobs.runs.diagnosis.findings import STATES_BY_SEVERITY
from tests.jobs.metrics.board import USE, fill_board, make_host_row, make_running_job, send_step, send_traffic
from tests.support.processes import ROOT, wait_until

TOKEN = "only-for-this-test-0123456789"
DASHBOARD = ROOT / "deploy/grafana/meshboard.json"
RULES = ROOT / "deploy/prometheus/rules.yml"
MAX_QUERIES = 17
# Values of labels that panels and rules select
LABEL_VALUES = {
    ("meshboard_hosts", "state"): set(CONTACT_STATES),
    ("meshboard_slots", "state"): {"held", "free", "unusable"},
    ("meshboard_job_verdict", "verdict"): set(STATES_BY_SEVERITY),
    ("meshboard_process_last_tick_timestamp_seconds", "process"): {"controller", "recorder"},
}


@pytest.fixture(autouse=True)
def _token(settings: Any) -> None:
    settings.METRICS_TOKEN = TOKEN


def scrape(client: Client) -> str:
    response = client.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    assert response.status_code == 200
    return response.content.decode()


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_require_the_metrics_token(owner: User, staff: User, client: Client, settings: Any) -> None:
    client.force_login(staff)
    for header in ("", "Bearer ", f"Bearer {TOKEN}x", f"Token {TOKEN}", f"bearer{TOKEN}", "Bearer \u00e9"):
        response = client.get("/metrics", headers={"Authorization": header} if header else {})
        assert (response.status_code, b"meshboard_jobs" in response.content) == (401, False)
    assert client.get(f"/metrics?token={TOKEN}").status_code == 401
    assert client.post("/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).status_code in (403, 405)
    settings.METRICS_TOKEN = ""
    for header in ("Bearer ", f"Bearer {TOKEN}"):
        assert client.get("/metrics", headers={"Authorization": header}).status_code == 404


def test_metrics_show_the_state_of_the_board(owner: User, client: Client, live_redis: redis.Redis) -> None:
    job = fill_board(owner)
    make_host_row("gone", 4, drained=True)
    for step in (3, 4):
        send_step(live_redis, job.id, step)
    samples_by_key = samples(scrape(client))

    def value(metric: str, /, **labels: str) -> float:
        return samples_by_key[f"meshboard_{metric}", tuple(sorted(labels.items()))]

    assert value("jobs", status="running") == value("jobs", status="queued") == 1
    assert value("jobs", status="failed") == 0
    assert value("queue_slots", device="cpu") == 4
    assert 0 <= value("queue_oldest_wait_seconds") < 60
    assert (value("slots", device="cpu", state="free"), value("slots", device="cpu", state="unusable")) == (8, 4)
    assert value("hosts", state="drained") == 1
    assert value("host_cpu_utilization_ratio", host="host-a") == 0.25
    assert value("verdicts", verdict="slow") == value("job_verdict", job=job.id, verdict="slow") == 1
    assert value("job_info", job=job.id, name="runs", project="default", kind="train", attempt="1") == 1
    assert value("job_step", job=job.id) == 4
    assert value("job_tokens_per_second", job=job.id) == 512, "the slower rank takes 1 s per step"
    assert value("job_loss", job=job.id) == 1.0
    assert value("rank_step_seconds", job=job.id, rank="1") == 1.0
    of_rank = {"job": job.id, "attempt": "1", "rank": "1"}
    assert value("rank_payload_bytes_total", **of_rank, axis="dp") == 4000, "counts the phase step only"
    assert value("rank_collectives_total", **of_rank, axis="tp") == 4
    assert value("trimmed_series", what="ranks") == 0


def test_metrics_have_the_last_step_during_a_long_step(owner: User, live_redis: redis.Redis) -> None:
    job = fill_board(owner)
    send_step(live_redis, job.id, 3, ranks=4)
    send_traffic(live_redis, job.id, 1000)
    assert collect_metrics()[RANK_BYTES][job.id, "1", "3", "dp"] == 3000


def test_number_of_queries_is_constant(owner: User, live_redis: redis.Redis) -> None:
    fill_board(owner)
    with CaptureQueriesContext(
        connection,
    ) as queries_before:
        collect_metrics()
    host = make_host_row("host-b")
    for number in range(5):
        make_running_job(owner, host, f"run {number}")
        make_host_row(f"host-{number}")
    with CaptureQueriesContext(connection) as queries_after:
        collect_metrics()
    assert len(queries_after) == len(queries_before) <= MAX_QUERIES


def test_limits_series_and_counts_omitted_ones(
    owner: User, live_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collection, "MAX_JOBS", 2)
    monkeypatch.setattr(collection, "MAX_JOB_RANKS", 3)
    monkeypatch.setattr(collection, "MAX_RANKS", 5)
    monkeypatch.setattr(collection, "MAX_HOSTS", 1)
    host = make_host_row()
    make_host_row("host-b")
    for number in range(4):
        send_step(live_redis, make_running_job(owner, host, f"run {number}").id, 1, ranks=4)
    Attempt.objects.update(diagnosis={"state": "well"})
    last = Member.objects.order_by("-pk")[0]
    Member.objects.create(
        attempt=last.attempt,
        node=1,
        host=host,
        host_name="a",
        first_rank=4,
        num_ranks=60,
        ordered=timezone.now(),
    )
    values_by_name = {family.name: values for family, values in collect_metrics().items()}
    assert len(values_by_name["meshboard_job_info"]) == 2
    assert len(values_by_name["meshboard_rank_step_seconds"]) == 5
    assert len(values_by_name["meshboard_host_slots"]) == 1
    assert values_by_name["meshboard_trimmed_series"] == {("jobs",): 2, ("ranks",): 3 + 60}
    assert sum(values_by_name["meshboard_hosts"].values()) == 2, "totals include the omitted hosts"
    assert values_by_name["meshboard_verdicts"]["well",] == 4, "verdicts include the omitted jobs"


def test_metrics_without_redis_have_no_ranks(owner: User, client: Client) -> None:
    fill_board(owner)
    text = scrape(client)
    assert "meshboard_job_info" in text
    assert "meshboard_rank_step_seconds" not in text


def test_metric_names_are_valid_and_documented(owner: User, client: Client, live_redis: redis.Redis) -> None:
    job = fill_board(owner)
    gpu = {"busy_percent": 50.0, "memory_bytes": 1, "celsius": 40.0, "watts": 300.0}
    make_host_row("gpus", device="cuda", use={**USE, "gpus": [gpu]})
    Job.objects.update(name='a "name"\\ with {everything}\n# HELP x')
    send_step(live_redis, job.id, 1)
    text = scrape(client)
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    families = text_string_to_metric_families(text)
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert names == {family.name for family in FAMILIES}, "every metric of the catalog has a sample"
    documented = set(re.findall(r"^\| `(meshboard_\w+)`", (ROOT / "docs/reference/metrics.md").read_text(), re.M))
    assert documented == names


def list_expressions() -> Iterator[tuple[str, str]]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    yield from re.findall(r"alert: (\w+)\n\s+expr: (.*)", RULES.read_text())


@pytest.mark.parametrize(("title", "expr"), list(list_expressions()))
def test_panels_and_rules_use_existing_metrics(title: str, expr: str) -> None:
    by_name = {family.name: family for family in FAMILIES}
    for name, labels in re.findall(r"(meshboard_\w+)(?:\{([^}]*)\})?", expr):
        assert name in by_name
        assert set(re.findall(r"(\w+)\s*[=!]", labels or "")) <= set(by_name[name].labels)
        for label, values in re.findall(r'(\w+)=~?"([^"$]+)"', labels or ""):
            if known := LABEL_VALUES.get((name, label)):
                assert set(values.split("|")) <= known, f"{name} has no {label} {values}"


def test_promtool_accepts_the_example_configuration(tmp_path: Path) -> None:
    for kind, file in (("rules", RULES), ("config", ROOT / "deploy/prometheus/prometheus.yml")):
        argv = ["promtool", "check", kind, *(["--syntax-only"] if kind == "config" else []), str(file)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


class Collector(http.server.BaseHTTPRequestHandler):
    """OTLP receiver that stores the requests."""

    requests: list[tuple[str, str, ExportMetricsServiceRequest]]
    traces: list[ExportTraceServiceRequest]

    def do_POST(self) -> None:
        if self.path == "/v1/traces":
            traces = ExportTraceServiceRequest()
            traces.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
            self.traces.append(traces)
            self.send_response(200)
            self.end_headers()
            return
        request = ExportMetricsServiceRequest()
        request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append((self.path, self.headers.get("x-token", ""), request))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Write no log."""


@pytest.fixture
def collector(settings: Any) -> Iterator[type[Collector]]:
    class Handler(Collector):
        requests, traces = [], []

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings.OTLP_ENDPOINT = f"http://127.0.0.1:{server.server_address[1]}"
        settings.OTLP_EVERY_S, settings.OTLP_HEADERS = 1, {"x-token": "abc"}
        yield Handler
        server.shutdown()


def export_once(collector: type[Collector]) -> tuple[str, str, ExportMetricsServiceRequest]:
    """Export once, and return path, token, and request that the collector got."""
    otlp = OtlpExporter()
    otlp.turn()
    try:
        return wait_until(lambda: collector.requests, "the collector gets a request", 20)[-1]
    finally:
        otlp.close()


def get_metrics(request: ExportMetricsServiceRequest) -> dict[str, Any]:
    (resource,) = request.resource_metrics
    return {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}


def values(points: Any) -> dict[tuple[str, ...], float]:
    return {
        tuple(attribute.value.string_value for attribute in point.attributes): point.as_int or point.as_double
        for point in points
    }


def test_otlp_exports_the_same_metrics(owner: User, live_redis: redis.Redis, collector: type[Collector]) -> None:
    job = fill_board(owner)
    send_step(live_redis, job.id, 2)
    path, token, request = export_once(collector)
    assert (path, token) == ("/v1/metrics", "abc")
    (resource,) = request.resource_metrics
    assert ("service.name", "meshboard") in {(a.key, a.value.string_value) for a in resource.resource.attributes}
    metrics = get_metrics(request)
    expected = collect_metrics()
    assert set(metrics) == {family.name.removesuffix("_total") for family in expected}
    sent = metrics["meshboard_rank_payload_bytes"]
    assert sent.sum.is_monotonic
    assert sent.unit == "By"
    assert values(sent.sum.data_points) == expected[RANK_BYTES]
    began = Attempt.objects.get(job=job).created.timestamp()
    assert {point.start_time_unix_nano for point in sent.sum.data_points} == {int(began * 1e9)}, (
        "the start time is constant, because a new start resets the counter"
    )
    steps = metrics["meshboard_rank_step_seconds"]
    assert sorted(point.as_double for point in steps.gauge.data_points) == sorted(expected[RANK_STEP].values())


def test_otlp_exports_all_series(owner: User, live_redis: redis.Redis, collector: type[Collector]) -> None:
    host = make_host_row(slots=1024)
    for number in range(16):
        send_step(live_redis, make_running_job(owner, host, f"run {number}").id, 1, ranks=64)
    _, _, request = export_once(collector)
    assert values(get_metrics(request)["meshboard_rank_payload_bytes"].sum.data_points) == collect_metrics()[RANK_BYTES]
    assert len(collect_metrics()[RANK_BYTES]) == 2 * 1024


def test_otlp_exports_a_span_per_ended_attempt_and_job(owner: User, collector: type[Collector]) -> None:
    job = make_running_job(owner, make_host_row(), "traced")
    Job.objects.filter(pk=job.pk).update(trace_id="4bf92f3577b34da6a3ce929d0e0e4736", status="failed")
    attempt = Attempt.objects.get(job=job)
    Attempt.objects.filter(pk=attempt.pk).update(
        ended=timezone.now(), exit={"outcome": "failed", "reason": "rank 1 failed"}
    )
    running = make_running_job(owner, make_host_row("host-b"), "running")
    Job.objects.filter(pk=running.pk).update(trace_id="0" * 31 + "1")
    otlp = OtlpExporter()
    otlp.turn()
    request = wait_until(lambda: collector.traces, "the collector gets spans", 20)[0]
    otlp._collected -= 10
    wait_until(lambda: not otlp._sending.is_alive(), "the export ends", 20)
    otlp.turn()
    wait_until(lambda: len(collector.requests) > 1, "the collector gets a second request", 20)
    otlp.close()
    assert len(collector.traces) == 1, "each span is sent once"
    of_attempt, of_job = request.resource_spans[0].scope_spans[0].spans
    assert {span.trace_id.hex() for span in (of_attempt, of_job)} == {"4bf92f3577b34da6a3ce929d0e0e4736"}
    assert (of_attempt.name, of_job.name) == ("attempt 1", f"job {job.kind}")
    assert of_attempt.parent_span_id == of_job.span_id
    assert build_traceparent(job.trace_id, job.id, 1).split("-")[2] == of_attempt.span_id.hex(), "the parent of ranks"
    assert (of_attempt.status.code, of_attempt.status.message) == (2, "rank 1 failed")
    assert of_attempt.start_time_unix_nano < of_attempt.end_time_unix_nano


def test_slow_collector_does_not_block_the_exporter(owner: User, settings: Any) -> None:
    settings.OTLP_EVERY_S = 1
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings.OTLP_ENDPOINT = f"http://127.0.0.1:{silent.getsockname()[1]}"
        otlp = OtlpExporter()
        otlp.turn()
        otlp._collected -= 10
        with CaptureQueriesContext(connection) as queries:
            otlp.turn()
        assert not queries, "collects nothing while the previous export is pending"
        otlp.close()


def test_descriptions_name_panels_that_need_gpus() -> None:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        needs = any(name in target["expr"] for target in panel["targets"] for name in GPU_METRICS)
        assert ("Needs GPUs" in panel["description"]) == needs
