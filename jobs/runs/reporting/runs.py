"""Process the reports of runs that were launched outside of the board: start, members, state, and end.

Such a run takes no slots and waits in no queue. `jobs.queue` writes the resulting states.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.utils import timezone

from contracts.control import AttemptReport, ExitReport
from jobs.core.audit import record
from jobs.core.credentials import hash_secret, issue_run_token
from jobs.core.errors import get_trace_id
from jobs.models import (
    EXTERNAL_ENGINE,
    TERMINAL,
    Attempt,
    Job,
    JobTag,
    Member,
    ReportedRun,
    RunToken,
    StateChange,
    Status,
)
from jobs.people.notifications.outbox import add_state_changes
from jobs.planning.drafts import estimate_job
from jobs.planning.hosts import get_cluster
from jobs.queue import attempt_completion, lifecycle, termination
from jobs.queue.inbound.event_handlers import record_checkpoint
from jobs.runs.reporting.requests import NodeRequest, RunRequest
from planner.cost.estimate import parse_plannable
from planner.facts.kinds import KINDS
from planner.facts.presets import PRESETS
from planner.facts.spec import JobSpec
from planner.facts.validation import Problem, SpecError, format_count

PLACEHOLDER_MODEL = "gpt-tiny"  # a spec needs a model, even if it is unknown


class OpenedAttempt(NamedTuple):
    """Hold a run and a token for it. `new`: this call created the run."""

    attempt: Attempt
    token: str
    new: bool


class NodeTakenError(Exception):
    """Another process reports for this node, or another node has this name."""


class RunEndedError(Exception):
    """The run has ended on the board. `cancel`: its processes are asked to end."""

    def __init__(self, words: str, *, cancel: bool) -> None:
        super().__init__(words)
        self.cancel = cancel


def open_run(owner: User, request: RunRequest) -> OpenedAttempt:
    """Create a run, or return the running run with the same key. Raise SpecError."""
    if request.world_size % request.nodes:
        remainder = request.world_size % request.nodes
        ranks_per_node = request.world_size // request.nodes
        message = (
            f"{format_count(request.world_size, 'rank')} are not divisible by {request.nodes} nodes. "
            f"With {ranks_per_node} per node, {remainder} would be left over."
        )
        raise SpecError([Problem("nodes", message)])
    if request.key is not None and (attempt := _find_by_key(owner, request)):
        return OpenedAttempt(attempt, issue_run_token(attempt), False)
    spec = _make_spec(request)
    try:
        with transaction.atomic():
            attempt = _create_run(owner, request, spec)
            return OpenedAttempt(attempt, issue_run_token(attempt), True)
    except IntegrityError:  # a concurrent request with the same key was first
        first = _find_by_key(owner, request)
        if first is None:
            raise
        return OpenedAttempt(first, issue_run_token(first), False)


def _find_by_key(owner: User, request: RunRequest) -> Attempt | None:
    """Return the running run of a key, None if there is none. Raise SpecError if it has another size."""
    found = ReportedRun.objects.filter(owner=owner, key=request.key).select_related("attempt__job").first()
    if found is None:
        return None
    if found.attempt.ended is not None:
        ReportedRun.objects.filter(pk=found.pk).update(key="")
        return None
    size = (found.attempt.job.num_slots, found.attempt.members.count())
    if size != (request.world_size, request.nodes):
        ranks, nodes = format_count(size[0], "rank"), format_count(size[1], "node")
        text = (
            f"The run has {ranks} on {nodes}, "
            f"but the request has {request.world_size} on {request.nodes}. Use the same numbers as the run."
        )
        raise SpecError([Problem("key", text)])
    return found.attempt


def _make_spec(request: RunRequest) -> JobSpec:
    if request.spec is None:
        return JobSpec.model_validate(_make_script_spec(request))
    spec = parse_plannable(request.spec)
    problems = []
    kind = KINDS[spec.kind]
    if not kind.trains or kind.shares_one_slot:
        message = f"`spec.kind` is {spec.kind}, but only `train` has a prediction. Use `train`, or omit `spec`."
        problems.append(Problem("spec.kind", message))
    if spec.layout.world_size != request.world_size:
        text = (
            f"`spec.layout` has {format_count(spec.layout.world_size, 'rank')}, "
            f"but `world_size` is {request.world_size}. Use equal numbers of ranks."
        )
        problems.append(Problem("spec.layout", text))
    if problems:
        raise SpecError(problems)
    resources = spec.resources.model_copy(update={"device": request.device})
    return spec.model_copy(update={"name": request.name, "resources": resources})


def _make_script_spec(request: RunRequest) -> dict[str, Any]:
    """Return the spec of a run without one, from its command and its number of ranks."""
    program, *arguments = request.command or ["unknown"]
    return {
        "kind": "script",
        "name": request.name,
        "model": PRESETS[PLACEHOLDER_MODEL].model.model_dump(),
        "layout": {"dp": request.world_size},
        "train": {"global_batch": request.world_size},
        "resources": {"device": request.device},
        "script": {"path": program[:1000] or "unknown", "args": arguments[:200]},
    }


def _create_run(owner: User, request: RunRequest, spec: JobSpec) -> Attempt:
    cluster = get_cluster(None, spec)
    job = Job.objects.create(
        owner=owner,
        name=request.name,
        spec=spec.model_dump(),
        kind=spec.kind,
        device=request.device,
        num_slots=request.world_size,
        engine=EXTERNAL_ENGINE,
        estimate=estimate_job(spec, cluster),
        hardware=cluster.model_dump(mode="json", exclude={"runs", "measured_steps"}),
        status=Status.STARTING,
        trace_id=get_trace_id(),
    )
    add_state_changes([StateChange(job=job, attempt=1, status=Status.STARTING, reason="launched elsewhere")])
    JobTag.objects.bulk_create(JobTag(job=job, name=name) for name in dict.fromkeys(request.tags))
    attempt, now, each = Attempt.objects.create(job=job, number=1), timezone.now(), request.world_size // request.nodes
    Member.objects.bulk_create(
        Member(attempt=attempt, node=n, host_name=f"node {n}", first_rank=n * each, num_ranks=each, ordered=now)
        for n in range(request.nodes)
    )
    ReportedRun.objects.create(
        attempt=attempt, owner=owner, key=request.key or "", tags=request.tags, command=request.command
    )
    record(owner.get_username(), "open run", "job", job.id, after={"name": job.name, "ranks": request.world_size})
    return attempt


def join_node(run: RunToken, request: NodeRequest) -> Member:
    """Register a node with its claim. A repeated request changes nothing.

    Raises:
        RunEndedError: The run has ended.
        SpecError: The run has no such node.
        NodeTakenError: Another process reports for this node, or another node has its name.
    """
    check_running(run.attempt)
    with transaction.atomic():
        lifecycle.lock_job(run.attempt.job_id)
        member = run.attempt.members.filter(node=request.node).first()
        if member is None:
            nodes = run.attempt.members.count()
            text = (
                f"`node` is {request.node}, but the run has only {format_count(nodes, 'node')}. Use 0 to {nodes - 1}."
            )
            raise SpecError([Problem("node", text)])
        claim = hash_secret(request.claim)
        if member.claim not in ("", claim):
            raise NodeTakenError(f"Another process reports for node {request.node} of this run.")
        if run.attempt.members.filter(host_name=request.name).exclude(pk=member.pk).exists():
            raise NodeTakenError(f"Another node of this run is named {request.name}. Use a different name per node.")
        Member.objects.filter(pk=member.pk).update(claim=claim, host_name=request.name, heard=timezone.now())
        # The engine of a launched job reports the start later.
        lifecycle.start_jobs({run.attempt.job_id: (run.attempt.number, f"starts on {request.name}")})
    member.refresh_from_db()
    return member


def check_running(attempt: Attempt) -> None:
    """Raise RunEndedError if the attempt has ended."""
    job = attempt.job
    if attempt.ended is None and attempt.number == job.attempt and job.status not in TERMINAL:
        return
    last = StateChange.objects.filter(job=job, attempt=attempt.number).last()
    words = f": {last.status}, {last.reason}" if last else ""
    # A run that the board did not launch continues after it was marked as lost.
    raise RunEndedError(f"The run has ended{words}.", cancel=job.engine != EXTERNAL_ENGINE)


def record_contact(member: Member) -> None:
    Member.objects.filter(pk=member.pk).update(heard=timezone.now())


def must_end(member: Member) -> bool:
    """Return True if the processes of a member must end: the job is cancelled, or another member of the job failed."""
    job = member.attempt.job
    if job.status == Status.CANCELLING:
        return True
    ended = member.attempt.members.filter(ended__isnull=False).exclude(outcome="succeeded")
    return job.engine != EXTERNAL_ENGINE and ended.exists()


def store_report(member: Member, report: AttemptReport) -> None:
    """Store the report of a member. Raise RunEndedError, or BadMessageError for a checkpoint of another run."""
    if "checkpoint" in report:
        record_checkpoint(report["checkpoint"], member.attempt)
    if report["state"] == "exited":
        _store_exit(member, report.get("exit"))
        return
    check_running(member.attempt)
    job_id, number = member.attempt.job_id, member.attempt.number
    note = report.get("note", "")
    if note != member.note:
        Member.objects.filter(pk=member.pk).update(note=note)
    if report["state"] == "running":
        lifecycle.change_status(job_id, number, Status.RUNNING, "training", only_from=(Status.STARTING,))


def _store_exit(member: Member, report: ExitReport | None) -> None:
    if report is None or member.ended is not None:
        return  # a repeated report, whose response was lost
    check_running(member.attempt)
    is_launched_here = member.attempt.job.engine != EXTERNAL_ENGINE
    if is_launched_here and report["outcome"] == "lost":
        # The member was asked to end and does not know why. Its engine reports the reason later.
        Member.objects.filter(pk=member.pk, ended__isnull=True).update(exit=report)
        return
    with transaction.atomic():
        if report["outcome"] == "cancelled" and not is_launched_here:  # the user ended it at the terminal
            job_id, number = member.attempt.job_id, member.attempt.number
            lifecycle.change_status(job_id, number, Status.CANCELLING, report["reason"])
        if report.get("preempted") and is_launched_here:
            termination.stop(member.attempt.job_id, member.attempt.number, "preempted", report["reason"])
        attempt_completion.end_member(member, report)
