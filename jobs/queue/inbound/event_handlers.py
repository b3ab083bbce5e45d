"""Apply events of hosts and supervisors to the database, and store events that fail as dead letters."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import msgpack
import redis
from django.db import InterfaceError, OperationalError, transaction
from django.db.models import Count, F, Q, QuerySet
from django.utils import timezone

from contracts.codec import BadMessageError
from contracts.control import AttemptReport, Event, ExitReport, HostEvent
from contracts.names import TASK_ACKNOWLEDGE, TASK_RESEND_REPORT, host_queue
from jobs.core.errors import is_database_read_only
from jobs.models import HOST_SILENT_AFTER, MAX_REASON_CHARACTERS, Attempt, DeadLetter, Host, Member, Outbox, Status
from jobs.people.notifications.host_mails import queue_host_mails
from jobs.queue import attempt_completion, lifecycle
from jobs.queue.orders import ORDER_LIFETIME

log = logging.getLogger(__name__)

AttemptKey = tuple[str, int]  # job, attempt

MAX_HEARTBEATS_PER_S = 5  # on average, far more than a host sends
MAX_HEARTBEAT_BURST = 1000
MAX_DEAD_LETTERS = 1000
MAX_DEAD_LETTERS_PER_SENDER = 200  # so one sender displaces few letters of the others
MAX_BODY_CHARACTERS = 4000
PROGRAM_LIMIT = "54"  # SQLSTATE class of values that are too large or complex


def handle_event(event: Event, entry: str, *, replayed: bool = False) -> None:
    """Apply an event. A report of a heartbeat that fails becomes a dead letter alone.

    `replayed`: the event may have been applied before.
    """
    if event["kind"] == "attempt":
        report = event["report"]
        member = _load_members(event["host"], [report]).get(_get_key(report))
        if member is not None and report["state"] != "exited" and not replayed:
            Member.objects.filter(pk=member.pk).update(heard=timezone.now())
        _handle_report(report, event["host"], member, is_newer=True, is_current=not replayed)
        return
    _check_sequence(event, entry)
    is_newer = _update_host(event, replayed=replayed)
    members = _load_members(event["host"], event["attempts"])
    for report in event["attempts"]:
        try:
            _handle_report(report, event["host"], members.get(_get_key(report)), is_newer=is_newer, is_current=True)
        except Exception as error:
            if is_transient(error):
                raise
            store_dead_letter(entry, report, error, event["host"])


def _check_sequence(event: HostEvent, entry: str) -> None:
    """Reject an implausibly high sequence number, which would make all later heartbeats look outdated."""
    elapsed_s = int(entry.partition("-")[0]) / 1000 - event["began"]  # both by the clock of Redis
    if elapsed_s < 0:
        return  # the clock was set back, so the elapsed time is unknown
    limit = MAX_HEARTBEAT_BURST + MAX_HEARTBEATS_PER_S * elapsed_s
    if event["sequence"] > limit:
        raise BadMessageError(
            f"sequence: {event['sequence']} is higher than {limit:.0f}, "
            f"the highest number of a host that started {elapsed_s:.0f} s ago"
        )


def _update_host(event: HostEvent, *, replayed: bool) -> bool:
    """Store a heartbeat if it is newer than the stored one, and return whether it is."""
    now = timezone.now()
    values: dict[str, Any] = {
        **{name: event[name] for name in ("slots", "device", "device_name", "memory_bytes", "boot_id")},
        **{name: event[name] for name in ("incarnation", "began", "sequence")},
        "note": event.get("note", ""),
        "problem": event.get("problem", ""),
        "address": event.get("address", ""),
        "holding": [[r["job"], r["attempt"], r["slots"]] for r in event["attempts"] if r["state"] != "exited"],
        "last_seen": now,
        "use": event.get("use"),
    }
    if "facts" in event:
        values["facts"] = event["facts"]
    reported = {_get_key(report) for report in event["attempts"]}
    with transaction.atomic():
        host, created = Host.objects.select_for_update(no_key=True).get_or_create(name=event["host"], defaults=values)
        if created:
            return True
        if host.problem and not values["problem"]:  # the cause of the failed launches is gone
            values |= {"num_faults": 0, "closed_until": None}
        newer = Q(began__lt=event["began"]) | Q(began=event["began"], sequence__lt=event["sequence"])
        if not replayed:
            # A silent host sends heartbeats that look old: the clock of Redis was set back, or the row is wrong.
            newer |= Q(last_seen__lt=now - HOST_SILENT_AFTER)
        if not Host.objects.filter(newer, pk=host.pk).update(**values):
            return False
        _count_missed(host, reported)
        if bool(values["problem"]) != bool(host.problem):
            queue_host_mails(host.name, values["problem"])
    if values["problem"] and values["problem"] != host.problem:
        log.warning("Host %s starts no jobs until its health check succeeds: %s", host.name, values["problem"])
    if host.boot_id != event["boot_id"]:
        exited = {_get_key(report) for report in event["attempts"] if report["state"] == "exited"}
        _end_members_before_boot(host, exited)
    return True


def _count_missed(host: Host, reported: set[AttemptKey]) -> None:
    """Count the heartbeats in a row without each member, and request reports of missed members."""
    unended = Member.objects.filter(host=host, ended__isnull=True).order_by()
    seen, missed = [], []
    for pk, job, number, ordered in unended.values_list("pk", "attempt__job_id", "attempt__number", "ordered"):
        if (job, number) in reported:
            seen.append(pk)
            continue
        missed.append(pk)
        if timezone.now() - ordered > ORDER_LIFETIME:
            _send_once(TASK_RESEND_REPORT, host.name, (job, number))
    Member.objects.filter(pk__in=missed).update(missed=F("missed") + 1)
    Member.objects.filter(pk__in=seen, missed__gt=0).update(missed=0)


def _end_members_before_boot(host: Host, exited: set[AttemptKey]) -> None:
    """End members from before a reboot. Their jobs return to the queue. `host` is the row before the heartbeat.

    Members that the host reports as exited end by their report.
    """
    unended = Member.objects.filter(host=host, ended__isnull=True, attempt__created__lte=host.last_seen)
    # A member that never ran and should still start is ordered again instead.
    ran = unended.filter(Q(attempt__job__status=Status.CANCELLING) | ~lifecycle.NEVER_RAN)
    for member in ran.select_related("attempt__job"):
        if (member.attempt.job_id, member.attempt.number) not in exited:
            exit = attempt_completion.build_exit_report(member.attempt, "failed", f"host {host.name} was rebooted")
            attempt_completion.end_member(member, {**exit, "host_fault": "restart"})


def _get_key(report: AttemptReport) -> AttemptKey:
    return report["job"], report["attempt"]


def _load_members(host: str, reports: list[AttemptReport]) -> dict[AttemptKey, Member]:
    jobs = {report["job"] for report in reports}
    if not jobs:
        return {}
    rows = Member.objects.filter(host__name=host, attempt__job_id__in=jobs).select_related("attempt__job", "host")
    return {(member.attempt.job_id, member.attempt.number): member for member in rows}


def _handle_report(
    report: AttemptReport, host: str, member: Member | None, *, is_newer: bool, is_current: bool
) -> None:
    """Apply the report of an attempt. An end always counts, and other states only from a newer message.

    `is_current`: the report is not from a replayed event.
    """
    if "checkpoint" in report and member is not None:
        record_checkpoint(report["checkpoint"], member.attempt)
    if report["state"] == "exited":
        exit = report.get("exit")
        if exit is None:
            return  # a later heartbeat contains the report
        if (exit["job"], exit["attempt"]) != _get_key(report):
            raise BadMessageError(
                f"exit: the exit report names attempt {exit['job']}/{exit['attempt']}, but the message names another"
            )
        _handle_exit(report, exit, host, member)
        return
    if member is None or member.ended is not None or not is_newer:
        return
    note = report.get("note", "")
    if note != member.note:
        Member.objects.filter(pk=member.pk).update(note=note)
    if report["state"] == "running":
        lifecycle.change_status(*_get_key(report), Status.RUNNING, "training", only_from=(Status.STARTING,))
    is_unreachable = member.attempt.job.status == Status.UNREACHABLE
    if is_current and is_unreachable and not attempt_completion.filter_silent_members(member.attempt).exists():
        reason = f"host {host} is back"
        lifecycle.change_status(*_get_key(report), Status.RUNNING, reason, only_from=(Status.UNREACHABLE,))


def record_checkpoint(name: str, attempt: Attempt) -> None:
    """Store the latest checkpoint of an attempt. Names compare like their steps.

    Raises:
        BadMessageError: The name belongs to another attempt.
    """
    if not name.startswith(f"{attempt.job_id}/{attempt.number}/"):
        raise BadMessageError(f"checkpoint: {name} does not belong to attempt {attempt.job_id}/{attempt.number}")
    if name > attempt.checkpoint:
        Attempt.objects.filter(pk=attempt.pk, checkpoint__lt=name).update(checkpoint=name)


def _handle_exit(report: AttemptReport, exit: ExitReport, host: str, member: Member | None) -> None:
    """End the member, without the report if that fails, because an ended member must hold no slots. Raise the error."""
    try:
        with transaction.atomic():
            if member is not None:
                attempt_completion.end_member(member, exit)
            _send_once(TASK_ACKNOWLEDGE, host, _get_key(report))
    except Exception as error:
        if member is None or is_transient(error):
            raise
        with transaction.atomic():
            problem = f"the job ended, but its exit report is unreadable ({type(error).__name__})"
            attempt_completion.lose_member(member, problem)
            _send_once(TASK_ACKNOWLEDGE, host, _get_key(report))
        raise


def _send_once(task: str, host: str, key: AttemptKey) -> None:
    """Write a message to the outbox unless it is there already."""
    row = {"task": task, "queue": host_queue(host), "arguments": list(key)}
    if not Outbox.objects.filter(**row).exists():
        Outbox.objects.create(**row)


def is_transient(error: Exception) -> bool:
    """Return whether the message may succeed later, because the database or Redis is unavailable or refuses writes."""
    if isinstance(error, redis.RedisError | InterfaceError) or is_database_read_only(error):
        return True
    state = getattr(error.__cause__, "sqlstate", None) or ""
    return isinstance(error, OperationalError) and not state.startswith(PROGRAM_LIMIT)


def store_dead_letter(entry: str, body: object, error: Exception, sender: str = "") -> None:
    """Store a message, or the part of one, that could not be applied."""
    reason = str(error) if isinstance(error, BadMessageError) else f"{type(error).__name__}: {error}"
    raw = body if isinstance(body, bytes) else repr(body).encode(errors="replace")
    text, host = _format_body(body)
    letter = DeadLetter.objects.create(
        entry=entry,
        sender=_clean(sender or host, 100),
        reason=_clean(reason, MAX_REASON_CHARACTERS),
        body=_clean(text, MAX_BODY_CHARACTERS),
        num_bytes=len(raw),
    )
    _delete_oldest(DeadLetter.objects.filter(sender=letter.sender), MAX_DEAD_LETTERS_PER_SENDER)
    delete_oldest_dead_letters()
    log.warning("Event %s could not be processed and is stored as a dead letter: %s", entry, _clean(reason, 300))


def delete_oldest_dead_letters() -> int:
    """Delete dead letters over the limit, and return their number."""
    return _delete_oldest(DeadLetter.objects.all(), MAX_DEAD_LETTERS)


def count_dead_letters(senders: Iterable[str]) -> dict[str, str]:
    """Return the number of dead letters by sender, such as "200 or more" if some may have been deleted."""
    names = list(senders)
    rows = DeadLetter.objects.filter(sender__in=names).order_by().values_list("sender").annotate(Count("id"))
    stored, is_full = dict(rows), DeadLetter.objects.count() >= MAX_DEAD_LETTERS
    counts = {name: stored.get(name, 0) for name in names}
    return {
        name: f"{n} or more" if is_full or n >= MAX_DEAD_LETTERS_PER_SENDER else str(n) for name, n in counts.items()
    }


def _delete_oldest(letters: QuerySet[DeadLetter], remaining: int) -> int:
    last = letters.order_by("-id").values_list("id", flat=True)[remaining - 1 : remaining].first()
    return 0 if last is None else letters.filter(id__lt=last).delete()[0]


def _format_body(body: object) -> tuple[str, str]:
    """Return a message as text, and the host that it names."""
    if not isinstance(body, bytes):
        return repr(body), ""
    try:
        message = msgpack.unpackb(body, strict_map_key=False, unicode_errors="replace")
        host = message.get("host", "") if isinstance(message, dict) else ""
        return repr(message), host if isinstance(host, str) else ""
    except Exception:  # arbitrary bytes, which failed before
        return repr(body[:MAX_BODY_CHARACTERS]), ""


def _clean(text: str, max_characters: int) -> str:
    """Return text that every database stores: without NUL and lone surrogates."""
    return text[:max_characters].replace("\0", "\\0").encode(errors="replace").decode()[:max_characters]
