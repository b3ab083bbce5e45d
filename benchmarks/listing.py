"""Measure the pages, REST lists, and admin lists with 10,000 jobs, and print the plan of each query.

    python -m benchmarks.listing [jobs]

The benchmark runs with SQLite and with PostgreSQL, if it is installed. Requests are made in this process, without a
network or a server. The only cached values are the steps of running jobs, for 2 s.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

COLUMNS = (
    *("owner", "workload", "layout", "status", "steps", "duration", "step_time", "loss", "reason"),
    *("created", "ended", "speed", "project"),
)
DEFAULT_NUM_JOBS = 10_000
REQUESTS = 40
NUM_RUNNING = 30
PAGES = {
    "page": "/",
    "page, last": "/?page=999999",
    "page, failed": "/?status=failed",
    "page, lab": "/?kind=lab",
    "page, project": "/?project=team",
    "page, words": "/?q=nowhere",
    "page, tag": "/?tag=nightly",
    "page, archive": "/?archived=only",
    "page, all columns": "/?" + "&".join(f"col={name}" for name in COLUMNS),
    "overview": "/overview/",
    "overview, owner": "/overview/",
    "palette": "/find/?q=run+9",
    "page of an owner": "/",
    "REST list": "/api/v1/jobs?limit=50",
    "REST, project": "/api/v1/jobs?limit=50&project=team",
    "admin list": "/admin/jobs/job/",
    "admin, failed": "/admin/jobs/job/?status__exact=failed",
    "job, ended": "/jobs/{ended}/",
    "job, running": "/jobs/{running}/",
}


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    import django

    django.setup()
    from django.conf import settings

    from tests.support.postgres import postgres_server, use_database
    from tests.support.processes import run_redis

    settings.ALLOWED_HOSTS = ["*"]
    count = int(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_NUM_JOBS
    with tempfile.TemporaryDirectory() as folder, run_redis(Path(folder) / "redis") as server:
        settings.REDIS_URL = server.url
        with use_database(f"sqlite:///{folder}/db.sqlite3"):
            measure("SQLite", count, server.client())
        with postgres_server() as url, use_database(url):
            measure("PostgreSQL", count, server.client())


def measure(database: str, count: int, redis: Any) -> None:
    """Fill the database, and print a line for each list and for each of its queries."""
    from django.db import connection

    staff, owner, jobs = fill_database(count, redis)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    print(f"\n{database}, {count:,} jobs, {NUM_RUNNING} of them running, {REQUESTS} requests each")
    print(f"{'list':<18}{'median ms':>10}{'p95 ms':>9}{'cpu ms':>9}{'queries':>9}{'kB':>7}")
    plans = []
    for name, path in PAGES.items():
        client, path = log_in_client(owner if "owner" in name else staff), path.format(**jobs)
        with capture_queries() as request:
            size = len(client.get(path).content)
        times, worked = zip(*(time_request(client, path) for _ in range(REQUESTS)), strict=True)
        p95, cpu = statistics.quantiles(times, n=20)[-1], statistics.median(worked)
        figures = f"{1e3 * statistics.median(times):>10.1f}{1e3 * p95:>9.1f}{1e3 * cpu:>9.1f}"
        print(f"{name:<18}{figures}{len(request):>9}{size / 1e3:>7.0f}")
        plans += [(name, plan) for sql in request for plan in explain_query(database, sql)]
    print("plans of the queries on jobs:")
    for name, plan in dict.fromkeys(plans):
        print(f"  {name:<18}{plan}")


def fill_database(count: int, redis: Any) -> tuple[Any, Any, dict[str, str]]:
    """Create jobs of two users in all states, and telemetry of the running ones.

    Returns:
        The users, and the IDs of an ended and of a running training job.
    """
    import msgpack
    from django.contrib.auth.models import User
    from django.utils import timezone

    from contracts.names import telemetry_stream
    from jobs.models import TERMINAL, Attempt, Host, Job, JobTag, Member, StateChange, Status
    from planner.cost.estimate import estimate
    from planner.facts.kinds import get_num_slots
    from planner.facts.parse_spec import parse_spec

    staff = User.objects.create_superuser("root", password="root-password")
    owner = User.objects.create_user("owner", password="owner-password")
    now = timezone.now()
    host = Host.objects.create(
        name="h", slots=4, device="cpu", device_name="a CPU", memory_bytes=2**33, boot_id="b", last_seen=now
    )
    specs = [
        parse_spec({"model": {"preset": "gpt-tiny"}, "layout": {"dp": 2, "tp": 2, "zero": 1}}),
        parse_spec({"model": {"preset": "llama-tiny"}, "layout": {"pp": 2}, "train": {"micro_batches": 4}}),
        parse_spec({"kind": "script", "layout": {"dp": 2}, "script": {"path": "train.py", "args": ["--lr", "1"]}}),
        parse_spec({"kind": "lab", "layout": {"dp": 2}}),
    ]
    made = [(spec, spec.model_dump(), estimate(spec)) for spec in specs]
    losses = [{"step": step, "loss": 2.5, "time": 1e9} for step in range(1, 51)]
    summary = {"steps": 50, "tokens_per_s": 1e4, "losses": losses, "eval_losses": [], "cells": {}, "verdict": {}}
    summary["measured"] = {"steps": 47, "step_s": 0.05}
    jobs = []
    Job._meta.get_field("created").auto_now_add = False  # the creation dates of the jobs are spread over days
    for index in range(count):
        spec, dumped, planned = made[index % len(made) if index % 10 else 0]
        ended = index < count - NUM_RUNNING
        status = TERMINAL[index % len(TERMINAL)] if ended else Status.RUNNING
        jobs.append(
            Job(
                owner=owner if index % 2 else staff,
                name=f"run {index} of {spec.kind}",
                project="default" if index % 5 else "team",
                spec=dumped,
                kind=spec.kind,
                device="cpu",
                num_slots=get_num_slots(spec),
                estimate=planned,
                status=status,
                created=now - timedelta(minutes=count - index),
            )
        )
    Job.objects.bulk_create(jobs, batch_size=500)
    exit_report = {"outcome": "succeeded", "reason": "ended", "log_tail": [], "summary": summary}
    verdict = {"state": "well", "sentence": "On plan.", "over": True, "measured": {"steps": 47, "step_s": 0.05}}
    attempts = [
        Attempt(job=job, number=1, exit=exit_report if job.status in TERMINAL else None, diagnosis=verdict)
        for job in jobs
    ]
    Attempt.objects.bulk_create(attempts, batch_size=500)
    states = (Status.QUEUED, Status.STARTING, Status.RUNNING)
    changes = (StateChange(job=job, attempt=1, status=state) for job in jobs for state in (*states, job.status))
    StateChange.objects.bulk_create(changes, batch_size=500)
    tagged = (JobTag(job=job, name=name) for job in jobs[::10] for name in ("nightly", f"of {job.kind}"))
    JobTag.objects.bulk_create(tagged, batch_size=500)
    Job.objects.filter(id__in=[job.id for job in jobs[: count - NUM_RUNNING : 20]]).update(archived=True)
    members = [
        Member(
            attempt=attempt, node=0, host=host, host_name=host.name, first_rank=0,
            num_ranks=attempt.job.num_slots, ordered=now,
        )
        for attempt in attempts
    ]  # fmt: skip
    Member.objects.bulk_create(members, batch_size=500)
    for job in jobs[-NUM_RUNNING:]:
        items = [{"kind": "step", "rank": 0, "step": 7}, {"kind": "log", "rank": 0, "lines": ["a line"] * 50}]
        for _ in range(20):
            redis.xadd(telemetry_stream(job.id, 1), {"b": msgpack.packb({"items": items})})
    trainings = [job.id for job in jobs if job.kind == "train"]
    return staff, owner, {"ended": trainings[0], "running": trainings[-1]}


def log_in_client(user: Any) -> Any:
    from django.test import Client

    client = Client()
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    return client


def time_request(client: Any, path: str) -> tuple[float, float]:
    """Return seconds of a request, and CPU seconds of this process without those of PostgreSQL."""
    began, worked = time.perf_counter(), time.process_time()
    answer = client.get(path)
    assert answer.status_code == 200
    return time.perf_counter() - began, time.process_time() - worked


@contextlib.contextmanager
def capture_queries() -> Iterator[list[tuple[str, Any]]]:
    """Yield a list that receives SQL and parameters of each query."""
    from django.db import connection

    request: list[tuple[str, Any]] = []

    def note(execute: Any, sql: str, parameters: Any, many: bool, context: Any) -> Any:
        request.append((sql, parameters))
        return execute(sql, parameters, many, context)

    with connection.execute_wrapper(note):
        yield request


def explain_query(database: str, request: tuple[str, Any]) -> list[str]:
    """Return the lines of a query plan that read the table of jobs."""
    from django.db import connection

    sql, parameters = request
    if not sql.startswith("SELECT") or '"jobs_job"' not in sql:
        return []
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN {'QUERY PLAN ' if database == 'SQLite' else ''}{sql}", parameters)
        lines = [str(row[-1]).strip() for row in cursor.fetchall()]
    wanted = [line.removeprefix("->  ").split("  (cost")[0] for line in lines if "jobs_job" in line or "B-TREE" in line]
    return [f"count: {line}" if "COUNT(" in sql else line for line in wanted]


if __name__ == "__main__":
    main()
