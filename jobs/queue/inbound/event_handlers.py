"""What a host or a supervisor says, held against what is known: believed if it is newer, and then written down.

Events that could not be taken in: kept where staff sees them, so that the ones behind them are.
"""

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
from jobs.models import HOST_SILENT_AFTER, Attempt, DeadLetter, Host, Member, Outbox, Status
from jobs.queue import attempt_completion, lifecycle
from jobs.queue.orders import ORDER_LIFETIME

Key = tuple[str, int]  # job, attempt

HEARTBEATS_PER_S = 5  # at most, on average: far more than a host sends that is woken again and again
HEARTBEATS_AT_ONCE = 1000


def handle_event(event: Event, entry: str, *, replayed: bool = False) -> None:
    """Take one event in; a report of a heartbeat that cannot be becomes a dead letter by itself.

    `replayed`: it may have been heard before.
    """
    if event["kind"] == "attempt":
        report = event["report"]
        member = _members(event["host"], [report]).get(_key(report))
        if member is not None and report["state"] != "exited" and not replayed:
            Member.objects.filter(pk=member.pk).update(heard=timezone.now())
        _hear_report(report, event["host"], member, believed=True, now=not replayed)
        return
    _check_sequence(event, entry)
    believed = _believe(event, replayed=replayed)
    members = _members(event["host"], event["attempts"])
    for report in event["attempts"]:
        try:
            _hear_report(report, event["host"], members.get(_key(report)), believed=believed, now=True)
        except Exception as error:
            if is_transient(error):
                raise
            store_dead_letter(entry, report, error, event["host"])


def _check_sequence(event: HostEvent, entry: str) -> None:
    """A number that is too high would make old news of all that the host says after it."""
    passed_s = int(entry.partition("-")[0]) / 1000 - event["began"]  # both by Redis' clock
    if passed_s < 0:
        return  # that clock was set back: it tells nothing of how many there were
    most = HEARTBEATS_AT_ONCE + HEARTBEATS_PER_S * passed_s
    if event["sequence"] > most:
        raise BadMessageError(
            f"sequence: {event['sequence']} is higher than {most:.0f}, "
            f"the highest number of a host that started {passed_s:.0f} s ago"
        )


def _believe(event: HostEvent, *, replayed: bool) -> bool:
    """Write down what a host says of itself if it is newer than what it said last; whether it was."""
    held = [[r["job"], r["attempt"], r["slots"]] for r in event["attempts"] if r["state"] != "exited"]
    now = timezone.now()
    told: dict[str, Any] = {
        "slots": event["slots"],
        "device": event["device"],
        "device_name": event["device_name"],
        "memory_bytes": event["memory_bytes"],
        "note": event.get("note", ""),
        "boot_id": event["boot_id"],
        "address": event.get("address", ""),
        "incarnation": event["incarnation"],
        "began": event["began"],
        "sequence": event["sequence"],
        "holding": held,
        "last_seen": now,
        "use": event.get("use"),
    }
    if "facts" in event:
        told["facts"] = event["facts"]
    named = {_key(report) for report in event["attempts"]}
    with transaction.atomic():
        host, new = Host.objects.select_for_update(no_key=True).get_or_create(name=event["host"], defaults=told)
        if new:
            return True
        newer = Q(began__lt=event["began"]) | Q(began=event["began"], sequence__lt=event["sequence"])
        if not replayed:
            # Only it is heard, and nothing newer: Redis' clock was set back, or what we know was not said by the host.
            newer |= Q(last_seen__lt=now - HOST_SILENT_AFTER)
        if not Host.objects.filter(newer, pk=host.pk).update(**told):
            return False
        unended = Member.objects.filter(host=host, ended__isnull=True).order_by()
        rows = list(unended.values_list("pk", "attempt__job_id", "attempt__number", "ordered"))
        known = {(job, number): pk for pk, job, number, _ in rows}
        missed = [pk for key, pk in known.items() if key not in named]
        Member.objects.filter(pk__in=missed).update(missed=F("missed") + 1)
        for pk, job, number, ordered in rows:
            if pk in missed and now - ordered > ORDER_LIFETIME:
                _send(TASK_RESEND_REPORT, host.name, (job, number))
        seen = [pk for key, pk in known.items() if key in named]
        Member.objects.filter(pk__in=seen, missed__gt=0).update(missed=0)
    if host.boot_id != event["boot_id"]:
        told_ended = {_key(report) for report in event["attempts"] if report["state"] == "exited"}
        _lose_before_boot(host, told_ended)
    return True


def _lose_before_boot(host: Host, told_ended: set[Key]) -> None:
    """`host` as it was known before the boot. An end that the host tells of is left to its report."""
    unended = Member.objects.filter(host=host, ended__isnull=True, attempt__created__lte=host.last_seen)
    # One that never ran and still should is ordered again instead.
    stays = unended.filter(Q(attempt__job__status=Status.CANCELLING) | ~lifecycle.NEVER_RAN)
    for member in stays.select_related("attempt"):
        if (member.attempt.job_id, member.attempt.number) not in told_ended:
            attempt_completion.lose_member(member, f"host {host.name} was rebooted")


def _key(report: AttemptReport) -> Key:
    return report["job"], report["attempt"]


def _members(host: str, reports: list[AttemptReport]) -> dict[Key, Member]:
    named = {report["job"] for report in reports}
    if not named:
        return {}
    rows = Member.objects.filter(host__name=host, attempt__job_id__in=named).select_related("attempt__job", "host")
    return {(member.attempt.job_id, member.attempt.number): member for member in rows}


def _hear_report(report: AttemptReport, host: str, member: Member | None, *, believed: bool, now: bool) -> None:
    """An end is true whenever it is told; anything else only where it is news. `now`: it was not said long ago."""
    if "checkpoint" in report and member is not None:
        record_checkpoint(report["checkpoint"], member.attempt)
    if report["state"] == "exited":
        told = report.get("exit")
        if told is None:
            return  # a later heartbeat brings it
        if (told["job"], told["attempt"]) != _key(report):
            raise BadMessageError(
                f"exit: the exit report names attempt {told['job']}/{told['attempt']}, but the message names another"
            )
        _hear_end(report, told, host, member)
        return
    if member is None or member.ended is not None or not believed:
        return
    note = report.get("note", "")
    if note != member.note:
        Member.objects.filter(pk=member.pk).update(note=note)
    if report["state"] == "running":
        lifecycle.change_status(*_key(report), Status.RUNNING, "training", only_from=(Status.STARTING,))
    unreachable = member.attempt.job.status == Status.UNREACHABLE
    if now and unreachable and not attempt_completion.filter_silent_members(member.attempt).exists():
        lifecycle.change_status(*_key(report), Status.RUNNING, f"host {host} is back", only_from=(Status.UNREACHABLE,))


def record_checkpoint(name: str, attempt: Attempt) -> None:
    """The newest stays: names of one attempt compare as their steps do. Raises BadMessageError."""
    if not name.startswith(f"{attempt.job_id}/{attempt.number}/"):
        raise BadMessageError(f"checkpoint: {name} does not belong to attempt {attempt.job_id}/{attempt.number}")
    if name > attempt.checkpoint:
        Attempt.objects.filter(pk=attempt.pk, checkpoint__lt=name).update(checkpoint=name)


def _hear_end(report: AttemptReport, told: ExitReport, host: str, member: Member | None) -> None:
    """Raises what went wrong after ending the member without its report: nothing is left of it to hold slots."""
    try:
        with transaction.atomic():
            if member is not None:
                attempt_completion.end_member(member, told)
            _acknowledge(report, host)
    except Exception as error:
        if member is None or is_transient(error):
            raise
        with transaction.atomic():
            problem = f"the job ended, but its exit report is unreadable ({type(error).__name__})"
            attempt_completion.lose_member(member, problem)
            _acknowledge(report, host)
        raise


def _acknowledge(report: AttemptReport, host: str) -> None:
    _send(TASK_ACKNOWLEDGE, host, _key(report))


def _send(task: str, host: str, key: Key) -> None:
    """Once, however often it is asked for before it goes out."""
    row = {"task": task, "queue": host_queue(host), "arguments": list(key)}
    if not Outbox.objects.filter(**row).exists():
        Outbox.objects.create(**row)


log = logging.getLogger(__name__)

MAX_DEAD_LETTERS = 1000  # rows, the newest
MAX_DEAD_LETTERS_PER_SENDER = 200  # so that one pushes out few of the others'
MAX_BODY_CHARACTERS = 4000
REASON_CHARACTERS = 1000
PROGRAM_LIMIT = "54"  # class of SQLSTATE: a value too large or too complex, and it will be so again


def is_transient(error: Exception) -> bool:
    """Whether the same message may fare better later: the database or Redis is away, locked or full."""
    if isinstance(error, redis.RedisError | InterfaceError):
        return True
    state = getattr(error.__cause__, "sqlstate", None) or ""
    return isinstance(error, OperationalError) and not state.startswith(PROGRAM_LIMIT)


def store_dead_letter(entry: str, body: object, error: Exception, sender: str = "") -> None:
    """Keep what could not be taken in: a message's bytes, or the part of one that could not be."""
    reason = str(error) if isinstance(error, BadMessageError) else f"{type(error).__name__}: {error}"
    raw = body if isinstance(body, bytes) else repr(body).encode(errors="replace")
    text, named = _readable(body)
    letter = DeadLetter.objects.create(
        entry=entry,
        sender=_plain(sender or named, 100),
        reason=_plain(reason, REASON_CHARACTERS),
        body=_plain(text, MAX_BODY_CHARACTERS),
        num_bytes=len(raw),
    )
    _keep_newest(DeadLetter.objects.filter(sender=letter.sender), MAX_DEAD_LETTERS_PER_SENDER)
    delete_oldest_dead_letters()
    log.warning("Event %s could not be processed and is stored as a dead letter: %s", entry, _plain(reason, 300))


def delete_oldest_dead_letters() -> int:
    """Keep the newest `MOST`; returns how many went."""
    return _keep_newest(DeadLetter.objects.all(), MAX_DEAD_LETTERS)


def count_of(sender: str) -> str:
    """How many there were of a sender, in words where some are no longer kept or may not be."""
    return count_dead_letters([sender])[sender]


def count_dead_letters(senders: Iterable[str]) -> dict[str, str]:
    """`count_of` each of these, asked at once."""
    names = list(senders)
    rows = DeadLetter.objects.filter(sender__in=names).order_by().values_list("sender").annotate(Count("id"))
    kept, full = dict(rows), DeadLetter.objects.count() >= MAX_DEAD_LETTERS
    told = {name: kept.get(name, 0) for name in names}
    return {name: f"{n} or more" if full or n >= MAX_DEAD_LETTERS_PER_SENDER else str(n) for name, n in told.items()}


def _keep_newest(letters: QuerySet[DeadLetter], most: int) -> int:
    last = letters.order_by("-id").values_list("id", flat=True)[most - 1 : most].first()
    return 0 if last is None else letters.filter(id__lt=last).delete()[0]


def _readable(body: object) -> tuple[str, str]:
    """A message as text, and the host it names as far as that can be told."""
    if not isinstance(body, bytes):
        return repr(body), ""
    try:
        told = msgpack.unpackb(body, strict_map_key=False, unicode_errors="replace")
        named = told.get("host", "") if isinstance(told, dict) else ""
        return repr(told), named if isinstance(named, str) else ""
    except Exception:  # no bytes may do harm here: they have failed once already
        return repr(body[:MAX_BODY_CHARACTERS]), ""


def _plain(text: str, most: int) -> str:
    """What every database takes as text: no NUL, no lone surrogate, at most so many characters."""
    return text[:most].replace("\0", "\\0").encode(errors="replace").decode()[:most]
