"""Measure time and queries of a scheduler pass, and the delay of a cancel during passes.

    python -m benchmarks.scheduling

The benchmark uses temporary SQLite and PostgreSQL databases, and a real Redis. Hosts have 8 slots. Jobs of five
projects request 1 to 32 slots, and each tenth job requests one host. "Busy" is the CPU time of this process.
"""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
django.setup()

from django.conf import settings  # noqa: E402
from django.contrib.auth.models import User  # noqa: E402
from django.db import connection  # noqa: E402
from django.utils import timezone  # noqa: E402

from jobs.models import (  # noqa: E402
    Attempt,
    Host,
    Job,
    Member,
    Membership,
    Project,
    Role,
    SlotAllocation,
    Status,
)
from jobs.queue import actions, lifecycle  # noqa: E402
from jobs.queue.scheduling.scheduler import schedule  # noqa: E402
from planner.facts.parse_spec import parse_spec  # noqa: E402
from tests.planner.wrong_specs import GOOD  # noqa: E402
from tests.support.postgres import postgres_server, use_database  # noqa: E402
from tests.support.processes import run_redis  # noqa: E402

SLOTS_PER_HOST = 8
SPEC = parse_spec(GOOD, slots=SLOTS_PER_HOST).model_dump()
NUM_CANCELS = 200
NUM_PROJECTS = 5


class QueryCounter:
    """Count the queries sent to the database."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        self.count += 1
        return execute(sql, params, many, context)


def fill_queue(hosts: int, jobs: int, owner: User) -> None:
    """Create empty hosts and queued jobs."""
    for model in (Job, Host, Project):
        model.objects.all().delete()
    now = timezone.now()
    projects = Project.objects.bulk_create(Project(name=f"project-{n}") for n in range(NUM_PROJECTS))
    Membership.objects.bulk_create(Membership(project=each, user=owner, role=Role.SUBMITTER) for each in projects)
    Host.objects.bulk_create(
        Host(
            name=f"host-{n:04}",
            slots=SLOTS_PER_HOST,
            device="cpu",
            device_name="cpu",
            memory_bytes=1,
            boot_id="b",
            last_seen=now,
        )
        for n in range(hosts)
    )
    chance = random.Random(0)
    Job.objects.bulk_create(
        Job(
            owner=owner,
            name=f"job-{n}",
            spec=SPEC,
            kind="train",
            device="cpu",
            num_slots=chance.choice((1, 2, 4, 8, 16, 32)),
            max_hosts=1 if n % 10 == 0 else 0,
            project=f"project-{n % NUM_PROJECTS}",
            wanted_host=f"host-{chance.randrange(hosts):04}" if n % 10 == 0 else "",
            priority=chance.choice((0, 0, 0, 5)),
            estimate={},
        )
        for n in range(jobs)
    )


def print_pass(what: str) -> None:
    """Run a pass of the scheduler, and print its time and queries."""
    queries = QueryCounter()
    Host.objects.update(last_seen=timezone.now())
    with connection.execute_wrapper(queries):
        begin, busy = time.perf_counter(), time.process_time()
        placed = schedule()
        seconds, busy = time.perf_counter() - begin, time.process_time() - busy
    print(
        f"  {what:<38} {seconds * 1e3:6,.0f} ms, {busy * 1e3:6,.0f} ms processor"
        f"  {queries.count:4} queries  {placed:5,} placed"
    )


def end_oldest_attempts(count: int) -> None:
    """End the oldest attempts, as reports of hosts would."""
    for attempt in Attempt.objects.filter(ended__isnull=True).order_by("id")[:count]:
        lifecycle.change_status(attempt.job_id, attempt.number, Status.SUCCEEDED, "done")
        for member in attempt.members.all():
            lifecycle.release_member(member)


def measure_passes(hosts: int, jobs: int, owner: User) -> None:
    """Run passes from a full queue until nothing changes."""
    fill_queue(hosts, jobs, owner)
    print(f" {jobs:,} queued jobs, {hosts} hosts")
    taken = list(Host.objects.order_by("id"))
    held = Job.objects.order_by("id").first()
    assert held is not None
    Job.objects.filter(id=held.id).update(status=Status.RUNNING)
    attempt = Attempt.objects.create(job=held, number=1)
    member = Member.objects.create(
        attempt=attempt, node=0, host=taken[0], host_name=taken[0].name, first_rank=0, num_ranks=1,
        ordered=timezone.now(),
    )  # fmt: skip
    SlotAllocation.objects.bulk_create(
        SlotAllocation(host=host, slot=slot, member=member) for host in taken for slot in range(SLOTS_PER_HOST)
    )
    print_pass("all hosts full, no reason written yet")
    print_pass("nothing new")
    SlotAllocation.objects.filter(slot__lt=2, host__in=taken[:5]).delete()
    print_pass("two slots free on five hosts")
    SlotAllocation.objects.all().delete()
    print_pass("all hosts empty")
    end_oldest_attempts(20)
    print_pass("20 jobs ended")


def measure_cancels(owner: User) -> None:
    """Cancel queued jobs while another thread runs the scheduler, and hosts end jobs."""
    fill_queue(500, 10_000, owner)
    over = threading.Event()
    done = 0

    def scheduling() -> None:
        nonlocal done
        while not over.is_set():
            schedule()
            end_oldest_attempts(5)
            done += 1
        connection.close()

    doomed = list(Job.objects.order_by("priority", "-created")[:NUM_CANCELS])
    thread = threading.Thread(target=scheduling)
    thread.start()
    waits = []
    for job in doomed:
        begin = time.perf_counter()
        cancelled = actions.cancel(job, "benchmark")
        waits.append(time.perf_counter() - begin)
        assert cancelled
        time.sleep(0.02)
    over.set()
    thread.join()
    waits.sort()
    worst, p95 = waits[-1], waits[int(0.95 * len(waits))]
    print(f" {NUM_CANCELS} cancels, 10,000 queued, {done} passes at the same time")
    print(f"  p50 {median(waits) * 1e3:.0f} ms, p95 {p95 * 1e3:.0f} ms, longest {worst * 1e3:.0f} ms")


def main() -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshboard-scheduling-")))
        redis = stack.enter_context(run_redis(folder / "redis"))
        settings.CHANNEL_LAYERS = {
            "default": {"BACKEND": "channels_redis.core.RedisChannelLayer", "CONFIG": {"hosts": [redis.url]}}
        }
        urls = {
            "SQLite": f"sqlite:///{folder / 'db.sqlite3'}",
            "PostgreSQL": stack.enter_context(postgres_server()),
        }
        for name, url in urls.items():
            print(name)
            with use_database(url):
                owner = User.objects.create_user("owner")
                measure_passes(500, 1_000, owner)
                measure_passes(500, 10_000, owner)
                measure_cancels(owner)


if __name__ == "__main__":
    main()
