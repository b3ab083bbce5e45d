"""Record the start, members, state, and end that an external run reports.

An external run takes no slot and does not queue. `jobs.queue.lifecycle` and `jobs.queue.attempt_completion` store its
state changes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.utils import timezone

from contracts.control import AttemptReport, ExitReport
from jobs.core.audit import record
from jobs.core.credentials import digest, issue
from jobs.models import ELSEWHERE, TERMINAL, Attempt, Job, JobTag, Member, ReportedRun, RunToken, StateChange, Status
from jobs.people.notifications.outbox import write
from jobs.planning.foretold import foretold
from jobs.planning.hardware import cluster_for
from jobs.queue import attempt_completion, lifecycle, termination
from jobs.queue.inbound.event_handlers import hear_checkpoint
from jobs.runs.reporting.requests import NodeRequest, RunRequest
from planner.cost.oversize import parse_plannable
from planner.facts.kinds import KINDS
from planner.facts.presets import PRESETS
from planner.facts.spec import JobSpec
from planner.facts.validation import Problem, SpecError, format_count

STAND_IN = "gpt-tiny"  # a spec names a model, also where nobody knows what is trained


class Opened(NamedTuple):
    """A run and a token for it; `new` where this call made it."""

    attempt: Attempt
    token: str
    new: bool


class TakenError(Exception):
    """Another process speaks for this node, or another node has this name."""


class EndedError(Exception):
    """The run is over for the board. `cancel`: what of it still lives is asked to end."""

    def __init__(self, words: str, *, cancel: bool) -> None:
        super().__init__(words)
        self.cancel = cancel


def open_run(owner: User, asked: RunRequest) -> Opened:
    """Make the run, or find the one that its key made before and that has not ended.

    Raises:
        SpecError: its spec does not fit it.
    """
    if asked.world_size % asked.nodes:
        left = asked.world_size % asked.nodes
        each = asked.world_size // asked.nodes
        text = (
            f"{format_count(asked.world_size, 'rank')} are not divisible by {asked.nodes} nodes. "
            f"With {each} per node, {left} would be left over."
        )
        raise SpecError([Problem("nodes", text)])
    if asked.key is not None and (found := _of_key(owner, asked)):
        return Opened(found, issue(found), False)
    spec = _spec(asked)
    try:
        with transaction.atomic():
            attempt = _make(owner, asked, spec)
            return Opened(attempt, issue(attempt), True)
    except IntegrityError:  # the same key came twice at once, and the other was first
        first = _of_key(owner, asked)
        if first is None:
            raise
        return Opened(first, issue(first), False)


def _of_key(owner: User, asked: RunRequest) -> Attempt | None:
    """
    Raises:
        SpecError: the key's run is of another size.
    """
    found = ReportedRun.objects.filter(owner=owner, key=asked.key).select_related("attempt__job").first()
    if found is None:
        return None
    if found.attempt.ended is not None:
        ReportedRun.objects.filter(pk=found.pk).update(key="")
        return None
    size = (found.attempt.job.num_slots, found.attempt.members.count())
    if size != (asked.world_size, asked.nodes):
        ranks, nodes = format_count(size[0], "rank"), format_count(size[1], "node")
        text = (
            f"The run has {ranks} on {nodes}, "
            f"but the request has {asked.world_size} on {asked.nodes}. Use the same numbers as the run."
        )
        raise SpecError([Problem("key", text)])
    return found.attempt


def _spec(asked: RunRequest) -> JobSpec:
    if asked.spec is None:
        return JobSpec.model_validate(_of_a_script(asked))
    spec = parse_plannable(asked.spec)
    found = []
    kind = KINDS[spec.kind]
    if not kind.trains or kind.shares_one_slot:
        found.append(
            Problem(
                "spec.kind",
                f"`spec.kind` is {spec.kind}, but only `train` has a prediction. Use `train`, or omit `spec`.",
            )
        )
    if spec.layout.world_size != asked.world_size:
        text = (
            f"`spec.layout` has {format_count(spec.layout.world_size, 'rank')}, "
            f"but `world_size` is {asked.world_size}. Use equal numbers of ranks."
        )
        found.append(Problem("spec.layout", text))
    if found:
        raise SpecError(found)
    resources = spec.resources.model_copy(update={"device": asked.device})
    return spec.model_copy(update={"name": asked.name, "resources": resources})


def _of_a_script(asked: RunRequest) -> dict[str, Any]:
    """What is known of a run without a spec: its command and how many ranks it has."""
    program, *arguments = asked.command or ["unknown"]
    return {
        "kind": "script",
        "name": asked.name,
        "model": PRESETS[STAND_IN].model.model_dump(),
        "layout": {"dp": asked.world_size},
        "train": {"global_batch": asked.world_size},
        "resources": {"device": asked.device},
        "script": {"path": program[:1000] or "unknown", "args": arguments[:200]},
    }


def _make(owner: User, asked: RunRequest, spec: JobSpec) -> Attempt:
    cluster = cluster_for(None, spec)
    job = Job.objects.create(
        owner=owner,
        name=asked.name,
        spec=spec.model_dump(),
        kind=spec.kind,
        device=asked.device,
        num_slots=asked.world_size,
        engine=ELSEWHERE,
        estimate=foretold(spec, cluster),
        hardware=cluster.model_dump(mode="json", exclude={"runs"}),
        status=Status.STARTING,
    )
    write([StateChange(job=job, attempt=1, status=Status.STARTING, reason="launched elsewhere")])
    JobTag.objects.bulk_create(JobTag(job=job, name=name) for name in dict.fromkeys(asked.tags))
    attempt, now, each = Attempt.objects.create(job=job, number=1), timezone.now(), asked.world_size // asked.nodes
    Member.objects.bulk_create(
        Member(attempt=attempt, node=n, host_name=f"node {n}", first_rank=n * each, num_ranks=each, ordered=now)
        for n in range(asked.nodes)
    )
    ReportedRun.objects.create(
        attempt=attempt, owner=owner, key=asked.key or "", tags=asked.tags, command=asked.command
    )
    record(owner.get_username(), "open run", "job", job.id, after={"name": job.name, "ranks": asked.world_size})
    return attempt


def join(run: RunToken, asked: NodeRequest) -> Member:
    """A node speaks up, from now on with its claim. Saying so again changes nothing.

    Raises:
        EndedError: the run is over.
        SpecError: it has no such node.
        TakenError: another process speaks for this node, or another node has its name.
    """
    refuse_ended(run.attempt)
    with transaction.atomic():
        lifecycle.lock(run.attempt.job_id)
        member = run.attempt.members.filter(node=asked.node).first()
        if member is None:
            nodes = run.attempt.members.count()
            text = f"`node` is {asked.node}, but the run has only {format_count(nodes, 'node')}. Use 0 to {nodes - 1}."
            raise SpecError([Problem("node", text)])
        claim = digest(asked.claim)
        if member.claim not in ("", claim):
            raise TakenError(f"Another process reports for node {asked.node} of this run.")
        if run.attempt.members.filter(host_name=asked.name).exclude(pk=member.pk).exists():
            raise TakenError(f"Another node of this run is named {asked.name}. Use a different name per node.")
        Member.objects.filter(pk=member.pk).update(claim=claim, host_name=asked.name, heard=timezone.now())
        # Of one that an engine of ours launched: this is before the engine tells that it runs.
        lifecycle.start({run.attempt.job_id: (run.attempt.number, f"starts on {asked.name}")})
    member.refresh_from_db()
    return member


def refuse_ended(attempt: Attempt) -> None:
    """Raises EndedError."""
    job = attempt.job
    if attempt.ended is None and attempt.number == job.attempt and job.status not in TERMINAL:
        return
    last = StateChange.objects.filter(job=job, attempt=attempt.number).last()
    words = f": {last.status}, {last.reason}" if last else ""
    # What the board did not launch goes on unharmed when it is given up.
    raise EndedError(f"The run has ended{words}.", cancel=job.engine != ELSEWHERE)


def hear(member: Member) -> None:
    """The member gives a sign of life."""
    Member.objects.filter(pk=member.pk).update(heard=timezone.now())


def must_end(member: Member) -> bool:
    """Whether its processes are asked to end: the job is cancelled, or another member failed of what we launched."""
    job = member.attempt.job
    if job.status == Status.CANCELLING:
        return True
    ended = member.attempt.members.filter(ended__isnull=False).exclude(outcome="succeeded")
    return job.engine != ELSEWHERE and ended.exists()


def take_report(member: Member, told: AttemptReport) -> None:
    """What a member says of itself.

    Raises:
        EndedError: the run is over.
        BadMessageError: it tells of another's checkpoint.
    """
    if "checkpoint" in told:
        hear_checkpoint(told["checkpoint"], member.attempt)
    if told["state"] == "exited":
        _take_exit(member, told.get("exit"))
        return
    refuse_ended(member.attempt)
    job_id, number = member.attempt.job_id, member.attempt.number
    note = told.get("note", "")
    if note != member.note:
        Member.objects.filter(pk=member.pk).update(note=note)
    if told["state"] == "running":
        lifecycle.change(job_id, number, Status.RUNNING, "training", only_from=(Status.STARTING,))


def _take_exit(member: Member, told: ExitReport | None) -> None:
    if told is None or member.ended is not None:
        return  # said before: its answer was lost
    refuse_ended(member.attempt)
    ours = member.attempt.job.engine != ELSEWHERE
    if ours and told["outcome"] == "lost":
        # It was told to end and does not know why: its engine says that, and this is kept until then.
        Member.objects.filter(pk=member.pk, ended__isnull=True).update(exit=told)
        return
    with transaction.atomic():
        if told["outcome"] == "cancelled" and not ours:  # by whoever launched it, at the terminal: theirs to end
            job_id, number = member.attempt.job_id, member.attempt.number
            lifecycle.change(job_id, number, Status.CANCELLING, told["reason"])
        if told.get("preempted") and ours:
            termination.stop(member.attempt.job_id, member.attempt.number, "preempted", told["reason"])
        attempt_completion.end(member, told)
