"""How an attempt ends: each member by itself, and the attempt, with the job's status, once the last one has."""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.utils import timezone

from contracts.control import ExitReport
from jobs.models import HOST_SILENT_AFTER, Attempt, Host, Job, Member, Status
from jobs.planning.learned import remember
from jobs.queue import lifecycle
from jobs.queue.control import stops
from jobs.queue.outcomes import finish, merged


def end(member: Member, told: ExitReport) -> None:
    """The host says that it ended: its exit, its slots, and what follows from that for the job, or nothing of it.

    Rows are locked in the order host, job, attempt, as wherever more than one is.
    """
    _no_longer_holds(member)
    lifecycle.lock(member.attempt.job_id)
    mine = Member.objects.filter(pk=member.pk, outcome="")
    if not mine.update(outcome=told["outcome"], reason=told["reason"]):
        Member.objects.filter(pk=member.pk).update(heard=None)  # nothing of it lives on
        _keep_late(member.attempt, told)
    elif lifecycle.release(member):
        _settle(member.attempt, (member, told))
    else:
        Member.objects.filter(pk=member.pk).update(exit=finish(member.attempt.job.spec, told).report)
        _tell_of_the_first(member, told["reason"])


def lose(member: Member, reason: str) -> None:
    """Nothing is left of the member, or nobody waits for it."""
    with transaction.atomic():
        lifecycle.lock(member.attempt.job_id)
        if not Member.objects.filter(pk=member.pk, outcome="").update(outcome="lost", reason=reason[:1000]):
            return
        if lifecycle.release(member):
            _settle(member.attempt)
        else:
            _tell_of_the_first(member, reason)


def fail_unsent(member: Member, reason: str) -> None:
    """An order that no host could read: the attempt fails, whoever of it was ordered already is told to end."""
    with transaction.atomic():
        job_id, number = member.attempt.job_id, member.attempt.number
        lifecycle.lock(job_id)
        if not stops.end_as_asked(job_id, number, reason):
            lifecycle.change(job_id, number, Status.FAILED, reason)
        for each in member.attempt.members.filter(ended__isnull=True):
            Member.objects.filter(pk=each.pk, outcome="").update(outcome="lost", reason=reason[:1000])
            lifecycle.release(each)


def doomed() -> list[tuple[str, int]]:
    """Attempts of which a member ended without success while others live: those are to end too."""
    found = Member.objects.filter(attempt__ended__isnull=True, ended__isnull=False).exclude(outcome="succeeded")
    return list(found.order_by().values_list("attempt__job_id", "attempt__number").distinct())


def _keep_late(attempt: Attempt, told: ExitReport) -> None:
    """The end of what was given up, told after all: kept where nothing else is, and no news for the job."""
    unknown = Attempt.objects.filter(pk=attempt.pk, exit__isnull=True, ended__isnull=False)
    unknown.update(exit=finish(attempt.job.spec, told).report)


def _settle(attempt: Attempt, last: tuple[Member, ExitReport] | None = None) -> None:
    """All members have ended, and the job is locked: what became of it. `last` is the end that was just told."""
    job = Job.objects.get(pk=attempt.job_id)
    members = list(attempt.members.select_related("host"))
    lost = [member for member in members if member.outcome == "lost"]
    exits = {member.pk: member.exit for member in members}
    if last is not None:
        exits[last[0].pk] = last[1]
    silent = sum(each.num_ranks for each in members if not (exits[each.pk] or {}).get("summary"))
    told = merged([exit for exit in exits.values() if exit is not None], silent)
    if told is not None and lost and len(members) > 1:  # the others ended because of it
        told = {**told, "outcome": "lost", "reason": lost[0].reason, "rank": None, "exit_code": None, "signal": None}
    did_all = False
    if told is not None:
        ending = finish(job.spec, told)
        did_all = ending.status == Status.SUCCEEDED and not lost
        Attempt.objects.filter(pk=attempt.pk, exit__isnull=True).update(exit=ending.report)
    reason = lost[0].reason if lost else told["reason"] if told else ""
    obeyed = next((exit["reason"] for exit in exits.values() if exit and exit["outcome"] == "cancelled"), reason)
    if not stops.end_as_asked(job.id, attempt.number, obeyed, did_all=did_all):
        if lost:
            lifecycle.change(job.id, attempt.number, Status.LOST, reason)
        elif told is not None:
            back = f"host {members[0].host_name} is back"
            lifecycle.change(job.id, attempt.number, Status.RUNNING, back, only_from=(Status.UNREACHABLE,))
            changed = lifecycle.change(job.id, attempt.number, ending.status, ending.reason)
            lead = members[0].host
            if changed and ending.profile is not None and lead is not None:
                profile = ending.profile.model_dump(mode="json")
                Host.objects.filter(pk=lead.pk).update(profile=profile, profiled=timezone.now())
    if told is not None and not lost and len(members) == 1:
        remember(members[0], ending.report)
    attempt.members.update(exit=None)  # the attempt's has all of it
    stops.follow(job.id, attempt.number)


def _tell_of_the_first(member: Member, reason: str) -> None:
    """What the job waits for after a member of several ended, where it did not end well."""
    if Member.objects.filter(pk=member.pk, outcome="succeeded").exists():
        return
    text = (
        (f"{reason}, so Meshboard ends the job on its other hosts")
        if reason
        else "Meshboard ends the job on its other hosts"
    )
    Job.objects.filter(id=member.attempt.job_id, attempt=member.attempt.number).filter(
        status__in=(Status.STARTING, Status.RUNNING, Status.UNREACHABLE)
    ).update(wait_reason=text[:500])


def silent_members(attempt: Attempt) -> Any:
    """Members that have not ended of which neither host worker nor supervisor was heard lately."""
    since = timezone.now() - HOST_SILENT_AFTER
    return attempt.members.filter(ended__isnull=True, host__last_seen__lt=since).exclude(heard__gte=since)


def _no_longer_holds(member: Member) -> None:
    """Its slots are free now, not with the host's next heartbeat."""
    if member.host_id is None:
        return
    host = Host.objects.select_for_update(no_key=True).get(pk=member.host_id)
    left = [held for held in host.holding if held[:2] != [member.attempt.job_id, member.attempt.number]]
    if left != host.holding:
        Host.objects.filter(pk=host.pk).update(holding=left)
