"""Reads what hosts and supervisors say, and turns it into changes of state."""

from __future__ import annotations

import logging
from typing import Any

import msgpack
import redis
from django.db import transaction
from django.utils import timezone

from contracts.control import VERSION, AttemptReport, Event, HostEvent
from contracts.names import EVENTS_STREAM, TASK_ACKNOWLEDGE, cancel_key, host_queue
from jobs.models import TERMINAL, Attempt, Cursor, Host, Outbox, Status
from jobs.queue import lifecycle
from jobs.queue.outcomes import finish

log = logging.getLogger(__name__)

CURSOR = "events"
CHUNK = 500
CANCEL_FLAG_S = 3600  # raised again each tick while it is needed


def drain(client: redis.Redis) -> int:
    """Apply every event since the last one applied; returns how many. Applying one twice changes nothing."""
    cursor, _ = Cursor.objects.get_or_create(name=CURSOR)
    done = 0
    while True:
        entries: Any = client.xrange(EVENTS_STREAM, min=f"({cursor.position}", count=CHUNK)
        for entry_id, fields in entries:
            try:
                apply(msgpack.unpackb(fields[b"b"]), client)
            except (KeyError, TypeError, ValueError, msgpack.UnpackException) as error:
                log.warning("skipped a malformed event %s: %r", entry_id, error)
            cursor.position = entry_id.decode()
            done += 1
        if entries:
            cursor.save(update_fields=["position"])
        if len(entries) < CHUNK:
            return done


def apply(event: Event, client: redis.Redis) -> None:
    """Take one event in."""
    if event["v"] != VERSION:
        raise ValueError(f"event version {event['v']}")
    if event["kind"] == "host":
        _apply_host(event, client)
        return
    _apply_report(event["report"], event["host"], client)


def _apply_host(event: HostEvent, client: redis.Redis) -> None:
    Host.objects.update_or_create(
        name=event["host"],
        defaults={
            "slots": event["slots"],
            "device": event["device"],
            "device_name": event["device_name"],
            "memory_bytes": event["memory_bytes"],
            "boot_id": event["boot_id"],
            "last_seen": timezone.now(),
        },
    )
    for report in event["attempts"]:
        _apply_report(report, event["host"], client)


def _apply_report(report: AttemptReport, host: str, client: redis.Redis) -> None:
    job_id, number = report["job"], report["attempt"]
    attempt = Attempt.objects.filter(job_id=job_id, number=number, host__name=host).select_related("job").first()
    if attempt is None:
        # Not ours: another installation's, or deleted. Let the host forget it once it has ended.
        if report["state"] == "exited":
            _acknowledge(job_id, number, host)
        return
    if report["state"] == "exited":
        _apply_exit(attempt, report)
        _acknowledge(job_id, number, host)
    elif attempt.job.status in TERMINAL or attempt.job.attempt != number:
        # A host came back with ranks that were given up: they must not share slots with what runs now.
        client.set(cancel_key(job_id, number), "1", ex=CANCEL_FLAG_S)
    elif report["state"] == "running" or attempt.job.status == Status.UNREACHABLE:
        lifecycle.change(job_id, number, Status.RUNNING, "training", only_from=(Status.STARTING, Status.UNREACHABLE))


def _apply_exit(attempt: Attempt, report: AttemptReport) -> None:
    ending = finish(attempt.job.spec, report["exit"])
    Attempt.objects.filter(pk=attempt.pk, exit__isnull=True).update(exit=ending.report)
    lifecycle.release(attempt)
    job_id, number = attempt.job_id, attempt.number
    if lifecycle.change(job_id, number, Status.CANCELLED, report["exit"]["reason"], only_from=(Status.CANCELLING,)):
        return
    lifecycle.change(job_id, number, Status.RUNNING, "the host is back", only_from=(Status.UNREACHABLE,))
    with transaction.atomic():  # a host's new profile and the end of its calibration together
        if lifecycle.change(job_id, number, ending.status, ending.reason) and ending.profile is not None:
            profile = ending.profile.model_dump(mode="json")
            Host.objects.filter(pk=attempt.host_id).update(profile=profile, profiled=timezone.now())


def _acknowledge(job_id: str, number: int, host: str) -> None:
    arguments = [job_id, number]
    queue = host_queue(host)
    if not Outbox.objects.filter(task=TASK_ACKNOWLEDGE, queue=queue, arguments=arguments).exists():
        Outbox.objects.create(task=TASK_ACKNOWLEDGE, queue=queue, arguments=arguments)


def known_attempts(client: redis.Redis) -> dict[str, set[tuple[str, int]]]:
    """By host, the attempts of its latest heartbeat."""
    latest: dict[str, set[tuple[str, int]]] = {}
    entries: Any = client.xrevrange(EVENTS_STREAM, count=CHUNK)
    for _, fields in entries:
        event = msgpack.unpackb(fields[b"b"])
        if event.get("kind") == "host" and event["host"] not in latest:
            latest[event["host"]] = {(r["job"], r["attempt"]) for r in event["attempts"]}
    return latest
