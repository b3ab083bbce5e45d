"""The controller survives failing stages, a second controller, and outages."""

from __future__ import annotations

import base64
import json
import logging
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import copy_context
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psycopg
import pytest
import redis
from django.contrib.auth.models import User
from django.db import DataError, OperationalError
from django.utils import timezone

from contracts.names import LEGACY_EVENTS_STREAM, TASK_ACKNOWLEDGE, TASK_LAUNCH, events_stream, host_queue
from jobs.core.errors import get_trace_id, set_request_id
from jobs.models import Attempt, DeadLetter, Host, Job, Lease, Member, Outbox, SlotAllocation, Status
from jobs.operations import controller
from jobs.operations.controller import Controller
from jobs.queue import actions, engines, orders
from jobs.queue.inbound import event_handlers
from jobs.queue.inbound.reconcile import EventReception
from jobs.queue.inbound.streams import read_events
from jobs.queue.orders import ORDER_LIFETIME, deliver
from jobs.queue.scheduling.scheduler import schedule
from tests.jobs.conftest import attempt_event, host_event, send_event
from tests.planner.wrong_specs import GOOD
from tests.support.postgres import terminate_sessions
from tests.support.processes import ROOT, RedisServer, base_environment, scale_timeout, wait_until

START_TIMEOUT_S = 120.0  # Django starts slowly on a busy machine.


@pytest.fixture
def job(owner: User, make_host: Callable[..., Host]) -> Job:
    make_host()
    made, _ = actions.submit(owner, GOOD)
    return made


@pytest.mark.parametrize("broken", ["read_events", "schedule", "reconcile", "deliver", "prune_if_due"])
def test_failing_stage_does_not_stop_the_others(
    job: Job, live_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch, caplog: Any, broken: str
) -> None:
    called: list[str] = []
    for stage in ("read_events", "schedule", "reconcile", "deliver", "prune_if_due"):

        def work(*_: Any, stage: str = stage) -> None:
            called.append(stage)
            if stage == broken:
                raise ZeroDivisionError("a bug")

        monkeypatch.setattr(engines if hasattr(engines, stage) else controller, stage, work)
    controller_ = Controller()
    for _ in range(3):
        controller_.run_once()
    assert called == ["read_events", "schedule", "reconcile", "deliver", "prune_if_due"] * 3
    records = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(records) == 1, "repeated errors are logged once per minute"
    assert "ZeroDivisionError" in caplog.text
    assert "Traceback" in caplog.text
    assert Lease.objects.get().ticked is None, "the pass was not complete"


def test_idle_pass_logs_nothing(job: Job, live_redis: redis.Redis, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    made = Controller()
    made.run_once()  # sends the order of the job
    caplog.clear()
    for _ in range(3):
        made.run_once()
    assert caplog.records == []
    assert Lease.objects.get().ticked is not None


@pytest.mark.usefixtures("postgres")
def test_reconnects_to_the_database(live_redis: redis.Redis, postgres_url: str, caplog: Any) -> None:
    made = Controller()
    made.run_once()
    first = Lease.objects.get().ticked
    with psycopg.connect(postgres_url) as other:
        terminate_sessions(other)
    made.run_once()
    made.run_once()
    last = Lease.objects.get().ticked
    assert first is not None
    assert last is not None
    assert last > first
    assert "Stage lease cannot continue" in caplog.text
    assert "Traceback" not in caplog.text


def test_detects_reception_gaps_with_either_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    reception = EventReception()
    began = reception.since
    reception.record_pass()
    assert reception.since == began
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 11)
    reception.record_pass()
    assert reception.since > began
    again = reception.since
    reception.record_pass()
    assert reception.since == again
    later = timezone.now() + timedelta(hours=1)
    monkeypatch.setattr(timezone, "now", lambda: later)
    reception.record_pass()
    assert reception.since == later


def test_redis_outage_does_not_mark_hosts_silent(
    job: Job, live_redis: redis.Redis, redis_service: RedisServer, owner: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage of Redis must not be reported as silence of a host."""
    made = Controller()
    made.run_once()
    queued, _ = actions.submit(owner, {**GOOD, "resources": {"device": "cpu", "host": "host-a"}})
    made.run_once()
    real_tick, real_now = time.monotonic, timezone.now
    redis_service.stop()
    monkeypatch.setattr(time, "monotonic", lambda: real_tick() + 40)
    monkeypatch.setattr(timezone, "now", lambda: real_now() + timedelta(seconds=40))
    made.tick()
    job.refresh_from_db()
    queued.refresh_from_db()
    assert job.status == Status.STARTING
    assert (
        "No CPU host is in contact with the board, because the controller has had no connection to Redis since"
        in queued.wait_reason
    )
    actions.cancel(job, "owner")
    made.tick()
    job.refresh_from_db()
    assert job.wait_reason.startswith("the controller has had no connection to Redis since")
    redis_service.start()
    made.tick()
    job.refresh_from_db()
    queued.refresh_from_db()
    assert (
        "No CPU host is in contact with the board, because the controller reconnected to Redis only at"
        in queued.wait_reason
    )
    assert job.wait_reason.startswith("the controller reconnected to Redis only at")
    monkeypatch.setattr(time, "monotonic", lambda: real_tick() + 75)
    monkeypatch.setattr(timezone, "now", lambda: real_now() + timedelta(seconds=75))
    made._listening._last, made._listening._last_tick = timezone.now(), time.monotonic()
    made.tick()
    job.refresh_from_db()
    queued.refresh_from_db()
    assert queued.wait_reason == "No CPU host is connected."
    assert "no contact with host" in job.wait_reason


class Cause(Exception):  # noqa: N818
    def __init__(self, sqlstate: str) -> None:
        self.sqlstate = sqlstate


def test_classifies_transient_errors() -> None:
    def set_cause(error: Exception, state: str) -> Exception:
        error.__cause__ = Cause(state)
        return error

    assert event_handlers.is_transient(OperationalError("database is locked"))
    assert event_handlers.is_transient(redis.ConnectionError())
    assert event_handlers.is_transient(set_cause(OperationalError("deadlock detected"), "40P01"))
    assert not event_handlers.is_transient(set_cause(OperationalError("stack depth limit exceeded"), "54001"))
    assert not event_handlers.is_transient(DataError("invalid byte sequence"))
    assert not event_handlers.is_transient(KeyError("host"))


def test_limits_dead_letters_and_removes_nul_bytes(
    db: None, live_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_handlers, "MAX_DEAD_LETTERS", 5)
    for slots in range(-9, 0):
        send_event(live_redis, host_event("host-x", slots=slots, device_name="a\0b" + "x" * 9000))
    live_redis.xadd(events_stream("host-x"), {"b": b"\xc1\0 no msgpack"})
    live_redis.xadd(events_stream("host-x"), {"other": b"1"})
    assert read_events(live_redis) == 11
    letters = list(DeadLetter.objects.all())
    assert len(letters) == 5
    assert "not msgpack" in letters[1].reason
    named = letters[2]
    assert (named.sender, len(named.body)) == ("host-x", event_handlers.MAX_BODY_CHARACTERS)
    assert "slots" in named.reason or "device_name" in named.reason
    assert named.num_bytes > 9000
    assert not any("\0" in letter.body + letter.reason for letter in letters)


def test_limits_dead_letters_per_sender(db: None, live_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_handlers, "MAX_DEAD_LETTERS", 10)
    monkeypatch.setattr(event_handlers, "MAX_DEAD_LETTERS_PER_SENDER", 3)
    send_event(live_redis, host_event("host-a", slots=-1))
    for _ in range(20):
        send_event(live_redis, host_event("host-x", slots=-1))
        live_redis.xadd(LEGACY_EVENTS_STREAM, {"b": b"\xc1 names no host"})
    assert read_events(live_redis) == 41
    senders = list(DeadLetter.objects.values_list("sender", flat=True))
    assert sorted(senders) == [""] * 3 + ["host-a"] + ["host-x"] * 3
    for stream, sender in ((LEGACY_EVENTS_STREAM, ""), (events_stream("host-x"), "host-x")):
        stream_info: Any = live_redis.xinfo_stream(stream)
        newest = stream_info["last-generated-id"].decode()
        assert DeadLetter.objects.filter(entry=newest, sender=sender).exists(), "the newest letters are stored"


def test_invalid_report_does_not_affect_others(job: Job, live_redis: redis.Redis) -> None:
    schedule()
    wrong = attempt_event(job.id, 1, "exited", "failed")["report"]
    wrong["exit"] |= {"job": "another", "attempt": 7}
    good = attempt_event(job.id, 1, "running")["report"]
    send_event(live_redis, host_event(attempts=[wrong, good]))
    read_events(live_redis)
    job.refresh_from_db()
    assert job.status == Status.RUNNING
    assert DeadLetter.objects.get().reason.startswith("exit: the exit report names attempt another/7")


def test_invalid_exit_report_ends_the_attempt(job: Job, live_redis: redis.Redis) -> None:
    schedule()
    Job.objects.update(spec={"kind": "unknown"})
    send_event(live_redis, attempt_event(job.id, 1, "exited", "succeeded"))
    read_events(live_redis)
    job.refresh_from_db()
    assert (job.status, SlotAllocation.objects.count()) == (Status.LOST, 0)
    assert DeadLetter.objects.get().sender == "host-a"
    assert Outbox.objects.filter(task=TASK_ACKNOWLEDGE).count() == 1, "the host does not repeat the report"


def test_order_expires_by_the_redis_clock(job: Job, live_redis: redis.Redis) -> None:
    schedule()
    before: Any = live_redis.time()
    assert deliver(live_redis) == 1
    assert Outbox.objects.count() == 0
    message: Any = live_redis.lindex(host_queue("host-a"), 0)
    envelope = json.loads(message)
    order = json.loads(base64.b64decode(envelope["body"]))[0][0]
    assert order["job"] == job.id
    assert 0 <= order["expires"] - before[0] - ORDER_LIFETIME.total_seconds() < 30


def test_trace_of_the_request_reaches_the_order_and_the_log(
    owner: User, make_host: Callable[..., Host], live_redis: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    host = make_host()
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"

    def submit() -> Job:
        set_request_id(None, f"00-{trace}-00f067aa0ba902b7-01".encode())
        return actions.submit(owner, GOOD)[0]

    with caplog.at_level(logging.INFO):
        submitted = copy_context().run(submit)
        schedule()
        deliver(live_redis)
    message: Any = live_redis.lindex(host_queue(host.name), 0)
    order = json.loads(base64.b64decode(json.loads(message)["body"]))[0][0]
    assert (submitted.trace_id, order["trace"]) == (trace, trace)
    logged = [record.getMessage() for record in caplog.records if getattr(record, "trace_id", "") == trace]
    assert logged == [
        f"submitted {submitted.id} (trace {trace})",
        f"{submitted.id}/1: sent to {host_queue(host.name)} (trace {trace})",
    ]


@pytest.mark.parametrize("header", [b"", b"00-" + b"0" * 32 + b"-00f067aa0ba902b7-01", b"\xff", b"00-abc-def-01"])
def test_trace_without_a_valid_header_is_the_request_id(header: bytes) -> None:
    context = copy_context()
    request_id = context.run(set_request_id, None, header)
    assert context.run(get_trace_id) == request_id


def test_delivers_orders_after_redis_was_emptied(job: Job, live_redis: redis.Redis) -> None:
    for number in range(3):
        Outbox.objects.create(task=TASK_ACKNOWLEDGE, queue=host_queue("host-a"), arguments=[job.id, number + 1])
        assert deliver(live_redis) == 1
        assert live_redis.llen(host_queue("host-a")) == 1
        live_redis.flushall()


def test_rejected_orders_stay_in_the_outbox(job: Job, live_redis: redis.Redis) -> None:
    rows = [
        Outbox.objects.create(task=TASK_ACKNOWLEDGE, queue=host_queue(f"host-{n}"), arguments=[job.id, n])
        for n in range(1, 4)
    ]
    live_redis.config_set("maxmemory", 1)
    with pytest.raises(Exception, match="memory"):
        deliver(live_redis)
    assert list(Outbox.objects.order_by("id")) == rows
    live_redis.config_set("maxmemory", 0)
    assert deliver(live_redis) == 3
    assert [live_redis.llen(host_queue(f"host-{n}")) for n in range(1, 4)] == [1, 1, 1]


def test_order_stays_in_the_outbox_during_an_outage(
    job: Job, live_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule()
    with monkeypatch.context() as broken:
        broken.setattr(orders, "encrypt_for_host", Mock(side_effect=OperationalError("database is locked")))
        with pytest.raises(OperationalError):
            deliver(live_redis)
    assert Outbox.objects.filter(task=TASK_LAUNCH).count() == 1
    assert deliver(live_redis) == 1
    assert live_redis.llen(host_queue("host-a")) == 1


def test_invalid_order_fails_its_job_only(job: Job, live_redis: redis.Redis) -> None:
    schedule()
    row = Outbox.objects.get()
    row.arguments[0]["slots"] = [-1]
    row.save()
    Outbox.objects.create(task=TASK_ACKNOWLEDGE, queue=host_queue("host-a"), arguments=["x", 1])
    assert deliver(live_redis) == 2
    assert live_redis.llen(host_queue("host-a")) == 1
    job.refresh_from_db()
    assert job.status == Status.FAILED
    assert Attempt.objects.get().ended is not None


def test_drops_the_order_of_an_ended_member(job: Job, live_redis: redis.Redis) -> None:
    schedule()
    Member.objects.update(ended=timezone.now())
    assert Outbox.objects.filter(task=TASK_LAUNCH).count() == 1
    deliver(live_redis)
    assert not live_redis.exists(host_queue("host-a"))


@pytest.fixture
def environment(redis_service: RedisServer, tmp_path: Path) -> dict[str, str]:
    """Simulate a controller with a new database."""
    made = {
        **base_environment(),
        "MESHBOARD_SECRET_KEY": "a key of this test alone 0123456789 0123456789 0123456789",
        "MESHBOARD_STATE_DIR": str(tmp_path),
        "MESHBOARD_DATABASE_URL": f"sqlite:///{tmp_path}/db.sqlite3",
        "MESHBOARD_REDIS_URL": redis_service.url,
        "MESHBOARD_HTTPS": "0",
    }
    manage(made, "migrate", "--verbosity", "0")
    return made


def manage(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "manage.py", *arguments]
    return subprocess.run(argv, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def start(environment: dict[str, str], tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    made: list[subprocess.Popen[bytes]] = []

    def start_controller(name: str) -> subprocess.Popen[bytes]:
        with (tmp_path / f"{name}.log").open("wb") as log:
            argv = [sys.executable, "manage.py", "controller"]
            made.append(subprocess.Popen(argv, env=environment, cwd=ROOT, stdout=log, stderr=log))
        return made[-1]

    yield start_controller
    for process in made:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_process_takes_over_survives_redis_and_exits(
    environment: dict[str, str],
    start: Callable[[str], subprocess.Popen[bytes]],
    redis_service: RedisServer,
    tmp_path: Path,
) -> None:
    def log(name: str) -> str:
        return (tmp_path / f"{name}.log").read_text()

    assert manage(environment, "controller", "--check").returncode == 1
    first = start("first")
    wait_until(
        lambda: manage(environment, "controller", "--check").returncode == 0, "a complete pass", START_TIMEOUT_S, 0.2
    )
    second = start("second")
    wait_until(lambda: "another controller runs" in log("second"), "the second one waits", START_TIMEOUT_S)
    first.kill()
    wait_until(lambda: "The other controller has ended" in log("second"), "the second one takes over", START_TIMEOUT_S)
    redis_service.stop(signal.SIGKILL)
    wait_until(lambda: "Stage events cannot continue" in log("second"), "it logs the outage", START_TIMEOUT_S)
    redis_service.start()
    heartbeat = "import redis; from tests.jobs.conftest import host_event, send_event"
    heartbeat += f"; send_event(redis.Redis.from_url({redis_service.url!r}), host_event(slots=7))"
    process = manage(
        environment, "shell", "--no-imports", "-c", heartbeat
    )  # Sent by a host that has joined this installation.
    assert process.returncode == 0, process.stderr
    wait_until(
        lambda: query_value(tmp_path, "SELECT slots FROM jobs_host") == 7,
        "the controller reads events again",
        START_TIMEOUT_S,
    )
    second.send_signal(signal.SIGTERM)
    assert second.wait(scale_timeout(5)) == 0
    assert "Traceback" not in log("second")
    third = start("third")
    holds = "SELECT holder LIKE '%process ' || ? || ' %' FROM jobs_lease"
    wait_until(lambda: query_value(tmp_path, holds, third.pid), "the third one holds the lease", START_TIMEOUT_S)
    assert "another controller" not in log("third"), "a clean exit releases the lease"


def query_value(folder: Path, query: str, *arguments: Any) -> int:
    with sqlite3.connect(folder / "db.sqlite3", timeout=20) as database:
        value: int = database.execute(query, arguments).fetchone()[0]
        return value
