"""How an attempt ended, from what its host says and what its kind of job must bring; nothing is stored here.

How an attempt ends: each member by itself, and the attempt, with the job's status, once the last one has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from django.db import transaction
from django.utils import timezone

from contracts.control import ExitReport, Outcome, Summary
from jobs.core.kinds import get_kind
from jobs.models import HOST_SILENT_AFTER, Attempt, Host, Job, Member, Status
from jobs.planning.measured_runs import store_measured_run
from jobs.queue import lifecycle, termination
from planner.facts.collectives import LabResult
from planner.hardware.profile import HostProfile

OUTCOMES = {
    "succeeded": Status.SUCCEEDED,
    "failed": Status.FAILED,
    "cancelled": Status.FAILED,
    "lost": Status.LOST,
}

# Whose word on a gang's end counts most. One that failed because it lost a peer is no cause, but better than nothing.
GRAVITY: list[tuple[Outcome, bool]] = [
    ("failed", False),
    ("lost", False),
    ("failed", True),
    ("cancelled", False),
    ("succeeded", False),
]
BY_RANK = ("cells", "verdict", "peak_bytes", "memory")
HOW_FAR = ("steps", "ran_steps")


class AttemptResult(NamedTuple):
    """`report` is what stays with the attempt; `profile` is for its host, of a calibration that ended well."""

    status: Status
    reason: str
    report: ExitReport
    profile: HostProfile | None


def evaluate_exit(spec: Mapping[str, Any], told: ExitReport) -> AttemptResult:
    """What becomes of a job whose host told this. A good end without what its kind must bring is a failure."""
    summary: Any = dict(told["summary"]) if told["summary"] else None
    status, reason = OUTCOMES[told["outcome"]], told["reason"]
    if told["outcome"] == "cancelled":  # who may write to Redis can raise its flag
        reason = f"canceled by a request in Redis that did not come from Meshboard: {reason}"
    profile, unusable = checked_profile(summary.pop("profile", None) if summary else None)
    lab = parse_lab_result(summary.pop("lab", None)) if summary else None
    if summary and lab:
        summary["lab"] = lab.model_dump(mode="json")
    report: ExitReport = {**told, "summary": summary}
    if status != Status.SUCCEEDED:
        return AttemptResult(status, reason, report, None)
    brings = get_kind(spec).result
    if problem := {"profile": unusable, "lab": failure(lab)}.get(brings or ""):
        return AttemptResult(Status.FAILED, problem, report, None)
    return AttemptResult(status, reason, report, profile if brings == "profile" else None)


def merge_reports(reports: list[ExitReport], silent_ranks: int = 0) -> ExitReport | None:
    """One report of a gang from those of its members, in the order of their ranks; None of none.

    What it says of its end is said by the member that ended it: the first to fail. `silent_ranks`: of members that
    told no summary.
    """
    if len(reports) < 2:
        return reports[0] if reports else None
    root = min(reports, key=_gravity)
    return {
        **root,
        "started": min(told["started"] for told in reports),
        "finished": max(told["finished"] for told in reports),
        "summary": _merged_summaries([told["summary"] for told in reports if told["summary"]], silent_ranks),
    }


def _gravity(told: ExitReport) -> tuple[int, float]:
    lost_peer = told["outcome"] == "failed" and told.get("lost_peer", False)
    return GRAVITY.index((told["outcome"], lost_peer)), told.get("failed_at", told["finished"])


def _merged_summaries(summaries: list[Summary], silent_ranks: int) -> Summary | None:
    """What is told rank by rank is joined. How far it came is all of the member that came furthest: a resumed run
    began after a member's steps less those that the same one ran. Of the rest, that of the lowest rank which told it.
    """
    if not summaries:
        return None
    whole: Any = {}
    if left_out := silent_ranks + sum(told.get("cells_left_out", 0) for told in summaries):
        whole["cells_left_out"] = left_out
    for told in summaries:
        for name, value in told.items():
            if name in BY_RANK:
                whole[name] = {**whole.get(name, {}), **cast(dict[str, Any], value)}
            elif name == "dry_runs":
                whole[name] = [*whole.get(name, []), *cast(list[Any], value)]
            elif name not in HOW_FAR and not whole.get(name):
                whole[name] = value
    furthest: Any = max(summaries, key=lambda told: told["steps"])
    whole |= {name: furthest[name] for name in HOW_FAR if name in furthest}
    return cast(Summary, whole)


def checked_profile(told: object) -> tuple[HostProfile | None, str]:
    """A host's profile, or why what was told is none."""
    try:
        return HostProfile.model_validate_json(json.dumps(told)), ""
    except (ValueError, TypeError) as error:  # msgpack may bring what JSON has no word for
        return None, f"the host sent no valid calibration profile: {str(error)[:300]}"


def parse_lab_result(told: object) -> LabResult | None:
    """A lab's result, None for what is none."""
    try:
        return LabResult.model_validate_json(json.dumps(told))
    except (ValueError, TypeError):
        return None


def failure(result: LabResult | None) -> str:
    """Why a lab that ended well has failed all the same; empty when it has not."""
    if result is None:
        return "the host sent no valid benchmark result"
    return f"{result.wrong} elements are wrong" if result.wrong else ""


def end_member(member: Member, told: ExitReport) -> None:
    """The host says that it ended: its exit, its slots, and what follows from that for the job, or nothing of it.

    Rows are locked in the order host, job, attempt, as wherever more than one is.
    """
    _no_longer_holds(member)
    lifecycle.lock_job(member.attempt.job_id)
    mine = Member.objects.filter(pk=member.pk, outcome="")
    if not mine.update(outcome=told["outcome"], reason=told["reason"]):
        Member.objects.filter(pk=member.pk).update(heard=None)  # nothing of it lives on
        _keep_late(member.attempt, told)
    elif lifecycle.release_member(member):
        _settle(member.attempt, (member, told))
    else:
        Member.objects.filter(pk=member.pk).update(exit=evaluate_exit(member.attempt.job.spec, told).report)
        _tell_of_the_first(member, told["reason"])


def lose_member(member: Member, reason: str) -> None:
    """Nothing is left of the member, or nobody waits for it."""
    with transaction.atomic():
        lifecycle.lock_job(member.attempt.job_id)
        if not Member.objects.filter(pk=member.pk, outcome="").update(outcome="lost", reason=reason[:1000]):
            return
        if lifecycle.release_member(member):
            _settle(member.attempt)
        else:
            _tell_of_the_first(member, reason)


def fail_unsent(member: Member, reason: str) -> None:
    """An order that no host could read: the attempt fails, whoever of it was ordered already is told to end."""
    with transaction.atomic():
        job_id, number = member.attempt.job_id, member.attempt.number
        lifecycle.lock_job(job_id)
        if not termination.finish_cancelling(job_id, number, reason):
            lifecycle.change_status(job_id, number, Status.FAILED, reason)
        for each in member.attempt.members.filter(ended__isnull=True):
            Member.objects.filter(pk=each.pk, outcome="").update(outcome="lost", reason=reason[:1000])
            lifecycle.release_member(each)


def list_attempts_to_end() -> list[tuple[str, int]]:
    """Attempts of which a member ended without success while others live: those are to end too."""
    found = Member.objects.filter(attempt__ended__isnull=True, ended__isnull=False).exclude(outcome="succeeded")
    return list(found.order_by().values_list("attempt__job_id", "attempt__number").distinct())


def _keep_late(attempt: Attempt, told: ExitReport) -> None:
    """The end of what was given up, told after all: kept where nothing else is, and no news for the job."""
    unknown = Attempt.objects.filter(pk=attempt.pk, exit__isnull=True, ended__isnull=False)
    unknown.update(exit=evaluate_exit(attempt.job.spec, told).report)


def _settle(attempt: Attempt, last: tuple[Member, ExitReport] | None = None) -> None:
    """All members have ended, and the job is locked: what became of it. `last` is the end that was just told."""
    job = Job.objects.get(pk=attempt.job_id)
    members = list(attempt.members.select_related("host"))
    lost = [member for member in members if member.outcome == "lost"]
    exits = {member.pk: member.exit for member in members}
    if last is not None:
        exits[last[0].pk] = last[1]
    silent = sum(each.num_ranks for each in members if not (exits[each.pk] or {}).get("summary"))
    told = merge_reports([exit for exit in exits.values() if exit is not None], silent)
    if told is not None and lost and len(members) > 1:  # the others ended because of it
        told = {**told, "outcome": "lost", "reason": lost[0].reason, "rank": None, "exit_code": None, "signal": None}
    did_all = False
    if told is not None:
        ending = evaluate_exit(job.spec, told)
        did_all = ending.status == Status.SUCCEEDED and not lost
        Attempt.objects.filter(pk=attempt.pk, exit__isnull=True).update(exit=ending.report)
    reason = lost[0].reason if lost else told["reason"] if told else ""
    obeyed = next((exit["reason"] for exit in exits.values() if exit and exit["outcome"] == "cancelled"), reason)
    if not termination.finish_cancelling(job.id, attempt.number, obeyed, did_all=did_all):
        if lost:
            lifecycle.change_status(job.id, attempt.number, Status.LOST, reason)
        elif told is not None:
            back = f"host {members[0].host_name} is back"
            lifecycle.change_status(job.id, attempt.number, Status.RUNNING, back, only_from=(Status.UNREACHABLE,))
            changed = lifecycle.change_status(job.id, attempt.number, ending.status, ending.reason)
            lead = members[0].host
            if changed and ending.profile is not None and lead is not None:
                profile = ending.profile.model_dump(mode="json")
                Host.objects.filter(pk=lead.pk).update(profile=profile, profiled=timezone.now())
    if told is not None and not lost and len(members) == 1:
        store_measured_run(members[0], ending.report)
    attempt.members.update(exit=None)  # the attempt's has all of it
    termination.requeue_if_due(job.id, attempt.number)


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


def filter_silent_members(attempt: Attempt) -> Any:
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
