"""End members of attempts, and the attempt with its last member.

Rows are always locked in the order host, job, attempt.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple, cast

from django.db import transaction
from django.db.models import F, QuerySet
from django.utils import timezone

from contracts.control import VERSION, ExitReport, Outcome, Summary
from jobs.core.kinds import get_kind
from jobs.models import (
    HOST_SILENT_AFTER,
    MAX_REASON_CHARACTERS,
    MAX_WAIT_REASON_CHARACTERS,
    Attempt,
    Host,
    Job,
    Member,
    Status,
)
from jobs.people.notifications.host_mails import queue_host_mails
from jobs.planning.measured_runs import store_measured_run
from jobs.queue import lifecycle, termination
from planner.facts.collectives import LabResult
from planner.hardware.profile import HostProfile

STATUS_BY_OUTCOME = {
    "succeeded": Status.SUCCEEDED,
    "failed": Status.FAILED,
    "cancelled": Status.FAILED,  # checked after a cancel by Meshboard
    "lost": Status.LOST,
}
# Outcome, and whether a peer was lost: the most likely cause of a gang's end first.
CAUSES: list[tuple[Outcome, bool]] = [
    ("failed", False),
    ("lost", False),
    ("failed", True),
    ("cancelled", False),
    ("succeeded", False),
]
FIELDS_BY_RANK = ("cells", "verdict", "peak_bytes", "memory")
PROGRESS_FIELDS = ("steps", "ran_steps")
MAX_RANK_FAULTS = 3  # attempts of a job with a host fault other than a failed launch. Later attempts fail
MAX_FAULTS_IN_ROW = 3  # failed launches until a host closes
CLOSED_AFTER_FAULTS = timedelta(minutes=10)  # then the next launch is the probe
log = logging.getLogger(__name__)


class AttemptResult(NamedTuple):
    """The status of an ended attempt, its stored report, and the profile from a successful calibration."""

    status: Status
    reason: str
    report: ExitReport
    profile: HostProfile | None


def evaluate_exit(spec: Mapping[str, Any], exit: ExitReport) -> AttemptResult:
    """Return the result of an exit report. A success without the result of its kind of job is a failure."""
    summary: Any = dict(exit["summary"]) if exit["summary"] else None
    status, reason = STATUS_BY_OUTCOME[exit["outcome"]], exit["reason"]
    if exit["outcome"] == "cancelled":  # every client of Redis can set the cancel flag
        reason = f"canceled by a request in Redis that did not come from Meshboard: {reason}"
    profile, profile_problem = _parse_profile(summary.pop("profile", None) if summary else None)
    lab = parse_lab_result(summary.pop("lab", None)) if summary else None
    if summary and lab:
        summary["lab"] = lab.model_dump(mode="json")
    report: ExitReport = {**exit, "summary": summary}
    if status != Status.SUCCEEDED:
        return AttemptResult(status, reason, report, None)
    lab_problem = "" if lab else "the host sent no valid benchmark result"
    if lab and lab.wrong:
        lab_problem = f"{lab.wrong} elements are wrong"
    brings = get_kind(spec).result
    if problem := {"profile": profile_problem, "lab": lab_problem}.get(brings or ""):
        return AttemptResult(Status.FAILED, problem, report, None)
    return AttemptResult(status, reason, report, profile if brings == "profile" else None)


def merge_reports(reports: list[ExitReport], silent_ranks: int = 0) -> ExitReport | None:
    """Merge the reports of a gang's members, in rank order. The member that failed first explains the end.

    `silent_ranks`: number of ranks without a summary.
    """
    if len(reports) < 2:
        return reports[0] if reports else None

    def rank_cause(exit: ExitReport) -> tuple[int, float]:
        lost_peer = exit["outcome"] == "failed" and exit.get("lost_peer", False)
        return CAUSES.index((exit["outcome"], lost_peer)), exit.get("failed_at", exit["finished"])

    return {
        **min(reports, key=rank_cause),
        "started": min(exit["started"] for exit in reports),
        "finished": max(exit["finished"] for exit in reports),
        "summary": _merge_summaries([exit["summary"] for exit in reports if exit["summary"]], silent_ranks),
    }


def _merge_summaries(summaries: list[Summary], silent_ranks: int) -> Summary | None:
    """Join fields with values per rank. Other fields come from the lowest rank that has them.

    Progress comes from the member with the most steps. The first step of a resumed run is the difference of its two
    progress fields.
    """
    if not summaries:
        return None
    merged: Any = {}
    if left_out := silent_ranks + sum(summary.get("cells_left_out", 0) for summary in summaries):
        merged["cells_left_out"] = left_out
    for summary in summaries:
        for name, value in summary.items():
            if name in FIELDS_BY_RANK:
                merged[name] = {**merged.get(name, {}), **cast(dict[str, Any], value)}
            elif name == "dry_runs":
                merged[name] = [*merged.get(name, []), *cast(list[Any], value)]
            elif name not in PROGRESS_FIELDS and not merged.get(name):
                merged[name] = value
    furthest: Any = max(summaries, key=lambda summary: summary["steps"])
    return cast(Summary, merged | {name: furthest[name] for name in PROGRESS_FIELDS if name in furthest})


def _parse_profile(data: object) -> tuple[HostProfile | None, str]:
    """Return the profile of a host, or None with the problem."""
    try:
        return HostProfile.model_validate_json(json.dumps(data)), ""
    except (ValueError, TypeError) as error:  # msgpack has types that JSON has not
        return None, f"the host sent no valid calibration profile: {str(error)[:300]}"


def parse_lab_result(data: object) -> LabResult | None:
    """Return the result of a benchmark of collectives, or None if it is invalid."""
    try:
        return LabResult.model_validate_json(json.dumps(data))
    except (ValueError, TypeError):
        return None


def build_exit_report(attempt: Attempt, outcome: Outcome, reason: str) -> ExitReport:
    """Return the report of a member whose host sent none."""
    return ExitReport(
        v=VERSION,
        job=attempt.job_id,
        attempt=attempt.number,
        outcome=outcome,
        reason=reason[:MAX_REASON_CHARACTERS],
        exit_code=None,
        rank=None,
        signal=None,
        log_tail=[],
        started=attempt.created.timestamp(),
        finished=time.time(),
        summary=None,
    )


def end_member(member: Member, exit: ExitReport) -> None:
    """Store the end that a host reported, free the slots, and end the attempt with its last member."""
    _remove_from_holding(member)
    if member.host_id is not None and Member.objects.filter(pk=member.pk, outcome="").exists():
        _count_host_faults(member.host_id, exit)
    lifecycle.lock_job(member.attempt.job_id)
    unended = Member.objects.filter(pk=member.pk, outcome="")
    if not unended.update(outcome=exit["outcome"], reason=exit["reason"]):
        # The report of a lost member: store it only if the attempt has none, and change no status.
        Member.objects.filter(pk=member.pk).update(heard=None)
        unknown = Attempt.objects.filter(pk=member.attempt_id, exit__isnull=True, ended__isnull=False)
        unknown.update(exit=evaluate_exit(member.attempt.job.spec, exit).report)
    elif lifecycle.release_member(member):
        _end_attempt(member.attempt, (member, exit))
    else:
        Member.objects.filter(pk=member.pk).update(exit=evaluate_exit(member.attempt.job.spec, exit).report)
        _explain_end_of_others(member, exit["reason"])


def lose_member(member: Member, reason: str) -> None:
    """Mark a member as lost, and end the attempt with its last member."""
    with transaction.atomic():
        lifecycle.lock_job(member.attempt.job_id)
        unended = Member.objects.filter(pk=member.pk, outcome="")
        if not unended.update(outcome="lost", reason=reason[:MAX_REASON_CHARACTERS]):
            return
        if lifecycle.release_member(member):
            _end_attempt(member.attempt)
        else:
            _explain_end_of_others(member, reason)


def fail_unsent(member: Member, reason: str) -> None:
    """Fail an attempt whose order cannot be sent. Members that started are stopped."""
    with transaction.atomic():
        job_id, number = member.attempt.job_id, member.attempt.number
        lifecycle.lock_job(job_id)
        if not termination.finish_cancelling(job_id, number, reason):
            lifecycle.change_status(job_id, number, Status.FAILED, reason)
        for each in member.attempt.members.filter(ended__isnull=True):
            unended = Member.objects.filter(pk=each.pk, outcome="")
            unended.update(outcome="lost", reason=reason[:MAX_REASON_CHARACTERS])
            lifecycle.release_member(each)


def list_attempts_to_end() -> list[tuple[str, int]]:
    """List attempts with an unsuccessful member while other members still run."""
    found = Member.objects.filter(attempt__ended__isnull=True, ended__isnull=False).exclude(outcome="succeeded")
    return list(found.order_by().values_list("attempt__job_id", "attempt__number").distinct())


def _end_attempt(attempt: Attempt, last: tuple[Member, ExitReport] | None = None) -> None:
    """Store the result of an attempt without live members. The job is locked. `last`: report of the last member."""
    job = Job.objects.get(pk=attempt.job_id)
    members = list(attempt.members.select_related("host"))
    lost = [member for member in members if member.outcome == "lost"]
    exits = {member.pk: member.exit for member in members}
    if last is not None:
        exits[last[0].pk] = last[1]
    silent_ranks = sum(each.num_ranks for each in members if not (exits[each.pk] or {}).get("summary"))
    exit = merge_reports([each for each in exits.values() if each is not None], silent_ranks)
    if exit is not None and lost and len(members) > 1:  # the other members ended because of the lost one
        exit = {**exit, "outcome": "lost", "reason": lost[0].reason, "rank": None, "exit_code": None, "signal": None}
    result = None if exit is None else evaluate_exit(job.spec, exit)
    if result is not None:
        Attempt.objects.filter(pk=attempt.pk, exit__isnull=True).update(exit=result.report)
    reason = lost[0].reason if lost else exit["reason"] if exit else ""
    cancel_reason = next((each["reason"] for each in exits.values() if each and each["outcome"] == "cancelled"), reason)
    did_all = result is not None and result.status == Status.SUCCEEDED and not lost
    if not termination.finish_cancelling(job.id, attempt.number, cancel_reason, did_all=did_all):
        _change_final_status(job.id, attempt.number, members, result, reason if lost else None)
    if result is not None and not lost and len(members) == 1:
        store_measured_run(members[0], result.report)
    attempt.members.update(exit=None)  # the attempt has the merged report
    termination.requeue_if_due(job.id, attempt.number)


def _change_final_status(
    job_id: str, number: int, members: list[Member], result: AttemptResult | None, lost_reason: str | None
) -> None:
    if lost_reason is not None:
        lifecycle.change_status(job_id, number, Status.LOST, lost_reason)
        return
    if result is None:
        return
    if result.status == Status.FAILED and (put_back_reason := _get_put_back_reason(job_id, result)):
        lifecycle.put_back(job_id, number, put_back_reason)
        return
    back = f"host {members[0].host_name} is back"
    lifecycle.change_status(job_id, number, Status.RUNNING, back, only_from=(Status.UNREACHABLE,))
    changed = lifecycle.change_status(job_id, number, result.status, result.reason)
    if changed and result.profile is not None and members[0].host is not None:
        profile = result.profile.model_dump(mode="json")
        Host.objects.filter(pk=members[0].host.pk).update(profile=profile, profiled=timezone.now())


def _get_put_back_reason(job_id: str, result: AttemptResult) -> str:
    """Return why the host and not the job made the attempt fail, or an empty text."""
    fault = result.report.get("host_fault")
    if fault is None:
        return ""
    if fault != "launch":  # a job can forge the log of this fault, or make its host restart
        faults = Attempt.objects.filter(job_id=job_id, exit__host_fault=fault)
        if faults.count() > MAX_RANK_FAULTS:
            return ""
    return f"queued again, because the host failed: {result.reason}"


def _count_host_faults(host_id: int, exit: ExitReport) -> None:
    """Close the host for some time after several launches in a row that failed because of the host."""
    hosts = Host.objects.filter(pk=host_id)
    if exit.get("host_fault") != "launch":
        was_closed = hosts.filter(closed_until__isnull=False).first()
        hosts.filter(num_faults__gt=0).update(num_faults=0, closed_until=None)
        if was_closed is not None and not was_closed.problem:
            queue_host_mails(was_closed.name, "")
        return
    hosts.update(num_faults=F("num_faults") + 1)
    until = timezone.now() + CLOSED_AFTER_FAULTS
    if hosts.filter(num_faults__gte=MAX_FAULTS_IN_ROW).update(closed_until=until, closed_reason=exit["reason"][:800]):
        log.warning("A host starts no jobs until %s UTC, because launches failed: %s", until, exit["reason"])
        if (host := hosts.first()) is not None and not host.problem:
            queue_host_mails(host.name, host.get_problem())


def _explain_end_of_others(member: Member, reason: str) -> None:
    """Show why a job ends on its other hosts after a member did not succeed."""
    if Member.objects.filter(pk=member.pk, outcome="succeeded").exists():
        return
    text = f"{reason}, so Meshboard ends the job on its other hosts" if reason else ""
    jobs = Job.objects.filter(id=member.attempt.job_id, attempt=member.attempt.number)
    jobs.filter(status__in=termination.STOPPABLE).update(
        wait_reason=(text or "Meshboard ends the job on its other hosts")[:MAX_WAIT_REASON_CHARACTERS]
    )


def filter_silent_members(attempt: Attempt) -> QuerySet[Member]:
    """Return unended members without recent contact with their host worker or supervisor."""
    since = timezone.now() - HOST_SILENT_AFTER
    return attempt.members.filter(ended__isnull=True, host__last_seen__lt=since).exclude(heard__gte=since)


def _remove_from_holding(member: Member) -> None:
    """Free the slots now instead of with the next heartbeat of the host."""
    if member.host_id is None:
        return
    host = Host.objects.select_for_update(no_key=True).get(pk=member.host_id)
    left = [item for item in host.holding if item[:2] != [member.attempt.job_id, member.attempt.number]]
    if left != host.holding:
        Host.objects.filter(pk=host.pk).update(holding=left)
