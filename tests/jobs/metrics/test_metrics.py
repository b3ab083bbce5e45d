"""/metrics: right, bounded, cheap, for its own token alone; the same by OTLP; a dashboard of what there is."""

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
from prometheus_client.parser import text_string_to_metric_families

from jobs.models import Attempt, Job, Member
from jobs.operations.metrics import collection as looked
from jobs.operations.metrics.collection import FAMILIES, GPU_METRICS, RANK_BYTES, RANK_STEP, collect_metrics
from jobs.operations.metrics.export import OtlpExporter
from tests.jobs.metrics.board import USE, board, go_on, host, running, tell
from tests.support.processes import ROOT, wait_until

TOKEN = "only-for-this-test-0123456789"
DASHBOARD = ROOT / "deploy/grafana/meshboard.json"
RULES = ROOT / "deploy/prometheus/rules.yml"
MOST_QUERIES = 17


@pytest.fixture(autouse=True)
def _token(settings: Any) -> None:
    settings.METRICS_TOKEN = TOKEN


def scraped(client: Client) -> str:
    answer = client.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 200
    return answer.content.decode()


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_only_the_board_s_own_token_reads_them(owner: User, staff: User, client: Client, settings: Any) -> None:
    client.force_login(staff)
    for given in ("", "Bearer ", f"Bearer {TOKEN}x", f"Token {TOKEN}", f"bearer{TOKEN}", "Bearer \u00e9"):
        answer = client.get("/metrics", headers={"Authorization": given} if given else {})
        assert (answer.status_code, b"meshboard_jobs" in answer.content) == (401, False)
    assert client.get(f"/metrics?token={TOKEN}").status_code == 401
    assert client.post("/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).status_code in (403, 405)
    settings.METRICS_TOKEN = ""
    for given in ("Bearer ", f"Bearer {TOKEN}"):
        assert client.get("/metrics", headers={"Authorization": given}).status_code == 404


def test_they_say_what_is(owner: User, client: Client, live_redis: redis.Redis) -> None:
    job = board(owner)
    host("gone", 4, drained=True)
    for step in (3, 4):
        tell(live_redis, job.id, step)
    told = samples(scraped(client))

    def value(metric: str, /, **labels: str) -> float:
        return told[f"meshboard_{metric}", tuple(sorted(labels.items()))]

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
    assert value("job_tokens_per_second", job=job.id) == 512, "of 1 s: the slower rank's"
    assert value("job_loss", job=job.id) == 1.0
    assert value("rank_step_seconds", job=job.id, rank="1") == 1.0
    of_rank = {"job": job.id, "attempt": "1", "rank": "1"}
    assert value("rank_payload_bytes_total", **of_rank, axis="dp") == 4000, "of phase step alone, and exact"
    assert value("rank_collectives_total", **of_rank, axis="tp") == 4
    assert value("trimmed_series", what="ranks") == 0


def test_a_job_is_told_of_between_two_long_steps(owner: User, live_redis: redis.Redis) -> None:
    job = board(owner)
    tell(live_redis, job.id, 3, ranks=4)
    go_on(live_redis, job.id, 1000)
    assert collect_metrics()[RANK_BYTES][job.id, "1", "3", "dp"] == 3000


def test_as_many_queries_whatever_there_is(owner: User, live_redis: redis.Redis) -> None:
    board(owner)
    with CaptureQueriesContext(
        connection,
    ) as few:
        collect_metrics()
    where = host("host-b")
    for number in range(5):
        running(owner, where, f"run {number}")
        host(f"host-{number}")
    with CaptureQueriesContext(connection) as many:
        collect_metrics()
    assert len(many) == len(few) <= MOST_QUERIES


def test_series_are_bounded_and_what_is_left_out_is_told(
    owner: User, live_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looked, "MAX_JOBS", 2)
    monkeypatch.setattr(looked, "MAX_JOB_RANKS", 3)
    monkeypatch.setattr(looked, "MAX_RANKS", 5)
    monkeypatch.setattr(looked, "MAX_HOSTS", 1)
    where = host()
    host("host-b")
    for number in range(4):
        tell(live_redis, running(owner, where, f"run {number}").id, 1, ranks=4)
    Attempt.objects.update(diagnosis={"state": "well"})
    last = Member.objects.order_by("-pk")[0]
    Member.objects.create(
        attempt=last.attempt, node=1, host=where, host_name="a", first_rank=4, num_ranks=60, ordered=timezone.now()
    )
    found = {family.name: values for family, values in collect_metrics().items()}
    assert len(found["meshboard_job_info"]) == 2
    assert len(found["meshboard_rank_step_seconds"]) == 5
    assert len(found["meshboard_host_slots"]) == 1
    assert found["meshboard_trimmed_series"] == {("jobs",): 2, ("ranks",): 3 + 60}
    assert sum(found["meshboard_hosts"].values()) == 2, "sums are of all"
    assert found["meshboard_verdicts"]["well",] == 4, "and so are verdicts"


def test_without_redis_the_rest_is_told(owner: User, client: Client) -> None:
    board(owner)
    text = scraped(client)
    assert "meshboard_job_info" in text
    assert "meshboard_rank_step_seconds" not in text


def test_names_are_as_prometheus_has_them(owner: User, client: Client, live_redis: redis.Redis) -> None:
    job = board(owner)
    gpu = {"busy_percent": 50.0, "memory_bytes": 1, "celsius": 40.0, "watts": 300.0}
    host("gpus", device="cuda", use={**USE, "gpus": [gpu]})
    Job.objects.update(name='a "name"\\ with {everything}\n# HELP x')
    tell(live_redis, job.id, 1)
    text = scraped(client)
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    families = text_string_to_metric_families(text)
    told = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert told == {family.name for family in FAMILIES}, "every one of the catalogue is told here"
    documented = set(re.findall(r"^\| `(meshboard_\w+)`", (ROOT / "docs/reference/metrics.md").read_text(), re.M))
    assert documented == told


def exprs() -> Iterator[tuple[str, str]]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    yield from re.findall(r"alert: (\w+)\n\s+expr: (.*)", RULES.read_text())


@pytest.mark.parametrize(("title", "expr"), list(exprs()))
def test_panels_and_rules_ask_for_what_there_is(title: str, expr: str) -> None:
    by_name = {family.name: family for family in FAMILIES}
    for name, labels in re.findall(r"(meshboard_\w+)(?:\{([^}]*)\})?", expr):
        assert name in by_name
        assert set(re.findall(r"(\w+)\s*[=!]", labels or "")) <= set(by_name[name].labels)


def test_promtool_takes_the_example_and_its_rules(tmp_path: Path) -> None:
    for what, file in (("rules", RULES), ("config", ROOT / "deploy/prometheus/prometheus.yml")):
        argv = ["promtool", "check", what, *(["--syntax-only"] if what == "config" else []), str(file)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


class Collector(http.server.BaseHTTPRequestHandler):
    """A small OTLP/HTTP receiver."""

    asked: list[tuple[str, str, ExportMetricsServiceRequest]]

    def do_POST(self) -> None:
        request = ExportMetricsServiceRequest()
        request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, self.headers.get("x-token", ""), request))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@pytest.fixture
def collector(settings: Any) -> Iterator[type[Collector]]:
    class Here(Collector):
        asked = []

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Here) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings.OTLP_ENDPOINT = f"http://127.0.0.1:{server.server_address[1]}"
        settings.OTLP_EVERY_S, settings.OTLP_HEADERS = 1, {"x-token": "abc"}
        yield Here
        server.shutdown()


def sent_to(collector: type[Collector]) -> tuple[str, str, ExportMetricsServiceRequest]:
    """What a look sends, and where to with which token."""
    otlp = OtlpExporter()
    otlp.turn()
    try:
        return wait_until(lambda: collector.asked, "the collector was told", 20)[-1]
    finally:
        otlp.close()


def metrics_of(request: ExportMetricsServiceRequest) -> dict[str, Any]:
    (resource,) = request.resource_metrics
    return {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}


def values(points: Any) -> dict[tuple[str, ...], float]:
    return {
        tuple(attribute.value.string_value for attribute in point.attributes): point.as_int or point.as_double
        for point in points
    }


def test_a_collector_gets_the_same_by_otlp(owner: User, live_redis: redis.Redis, collector: type[Collector]) -> None:
    job = board(owner)
    tell(live_redis, job.id, 2)
    path, token, request = sent_to(collector)
    assert (path, token) == ("/v1/metrics", "abc")
    (resource,) = request.resource_metrics
    assert ("service.name", "meshboard") in {(a.key, a.value.string_value) for a in resource.resource.attributes}
    metrics = metrics_of(request)
    wanted = collect_metrics()
    assert set(metrics) == {family.name.removesuffix("_total") for family in wanted}
    sent = metrics["meshboard_rank_payload_bytes"]
    assert sent.sum.is_monotonic
    assert sent.unit == "By"
    assert values(sent.sum.data_points) == wanted[RANK_BYTES]
    began = Attempt.objects.get(job=job).created.timestamp()
    assert {point.start_time_unix_nano for point in sent.sum.data_points} == {int(began * 1e9)}, (
        "since when it counts: another start tells a reader that all of it was sent again"
    )
    steps = metrics["meshboard_rank_step_seconds"]
    assert sorted(point.as_double for point in steps.gauge.data_points) == sorted(wanted[RANK_STEP].values())


def test_a_collector_is_told_of_as_many_series_as_prometheus(
    owner: User, live_redis: redis.Redis, collector: type[Collector]
) -> None:
    where = host(slots=1024)
    for number in range(16):
        tell(live_redis, running(owner, where, f"run {number}").id, 1, ranks=64)
    _, _, request = sent_to(collector)
    assert values(metrics_of(request)["meshboard_rank_payload_bytes"].sum.data_points) == collect_metrics()[RANK_BYTES]
    assert len(collect_metrics()[RANK_BYTES]) == 2 * 1024


def test_a_collector_that_is_slow_holds_up_nothing_and_is_told_of_no_old_figures(owner: User, settings: Any) -> None:
    settings.OTLP_EVERY_S = 1
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings.OTLP_ENDPOINT = f"http://127.0.0.1:{silent.getsockname()[1]}"
        otlp = OtlpExporter()
        otlp.turn()
        otlp._collected -= 10
        with CaptureQueriesContext(connection) as asked:
            otlp.turn()
        assert not asked, "it looks again once the collector has taken what it was told"
        otlp.close()


def test_panels_that_need_gpus_say_so() -> None:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        needs = any(name in target["expr"] for target in panel["targets"] for name in GPU_METRICS)
        assert ("Needs GPUs" in panel["description"]) == needs
