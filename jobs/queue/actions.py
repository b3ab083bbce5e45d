"""What a person or CI can do to a job; each action is one transaction."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from typing import Any, NamedTuple

from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.db.models import Max
from django.utils import timezone

from jobs.core.audit import record
from jobs.models import (
    HOST_SILENT_AFTER,
    Attempt,
    Dependency,
    Host,
    IdempotentRequest,
    Job,
    Member,
    StateChange,
    Status,
)
from jobs.models.jobs import VERIFICATION_FAILED
from jobs.people.notifications.outbox import write
from jobs.planning.admission import find_board_problems
from jobs.planning.auto_layout import apply_smaller_layout, find_smaller_layout, resolve_auto_layout
from jobs.planning.checkpoints import find_checkpoint_problems
from jobs.planning.drafts import estimate_job
from jobs.planning.fit import require_fit, split_allow_unfit
from jobs.planning.hosts import AvailableHost, get_slot_device, list_hosts, predict_cluster
from jobs.queue import attempt_completion, lifecycle
from planner.cost.estimate import parse_plannable
from planner.facts.kinds import compute_slot_demand
from planner.facts.spec import JobSpec
from planner.facts.spec_rules import find_unsupported_fields
from planner.facts.validation import SpecError, format_count
from planner.search.auto_layout import AutoLayout


class KeyReusedError(Exception):
    """An Idempotency-Key came again with another body."""


class DisprovedError(Exception):
    """What a job's attempt saved is not to be gone on from by itself."""


class CheckedSpec(NamedTuple):
    """A spec that its owner may have run, and the hosts that there were then. `chosen`: what took the place of a layout
    "auto" in it; None where it names one. `allow_unfit`: whether it is queued even if its memory does not fit."""

    spec: JobSpec
    there: list[AvailableHost]
    chosen: AutoLayout | None
    allow_unfit: bool = False


def check_spec(owner: User, data: object) -> CheckedSpec:
    """Parse a spec, and hold it against the hosts there are and the jobs that its owner may see.

    Raises:
        SpecError: with every problem.
        BusyError: it asks for a layout to be chosen, and too much is planned at once.
    """
    data, allow_unfit = split_allow_unfit(data)
    data, chosen = resolve_auto_layout(data)
    spec = parse_plannable(data)
    there = list_hosts(spec)
    if refused := [
        *find_board_problems(owner, spec, there),
        *find_unsupported_fields(spec),
        *find_checkpoint_problems(owner, spec),
    ]:
        raise SpecError(refused)
    return CheckedSpec(spec, there, chosen, allow_unfit)


def submit(
    owner: User, data: object, *, key: str | None = None, request_body: object = None, check_of: Job | None = None
) -> tuple[Job, StateChange | None]:
    """Queue a job. Returns it, and how it was queued: None where `key` and body were seen before, and so was it.

    `told`: what came with `key`, where `data` was made of it.
    `check_of`: the run that it is a check of, as `jobs.queue.derived_jobs` makes one.

    Raises:
        SpecError: the spec cannot run.
        UnfitError: its memory does not fit, and `data` has no `allow_unfit`.
        BusyError: it asks for a layout to be chosen, and too much is planned at once.
        KeyReusedError: `key` was used for another body.
    """
    if key is None:
        return _queue(owner, check_spec(owner, data), check_of)
    body = data if request_body is None else request_body
    if earlier := find_idempotent_job(owner, key, body):
        return earlier, None
    asked = check_spec(owner, data)
    try:
        with transaction.atomic():
            job, queued = _queue(owner, asked, check_of)
            IdempotentRequest.objects.create(user=owner, key=key, body_hash=_hash(body), job=job)
    except IntegrityError:  # the same key came twice at once, and the other was first
        first = find_idempotent_job(owner, key, body)
        if first is None:
            raise
        return first, None
    return job, queued


def find_idempotent_job(owner: User, key: str, body: object) -> Job | None:
    """The job this key and body made, None while the key is new.

    Raises:
        KeyReusedError: the key made a job of another body.
    """
    seen = IdempotentRequest.objects.filter(user=owner, key=key).select_related("job__owner").first()
    if seen is not None and seen.body_hash != _hash(body):
        raise KeyReusedError
    return seen.job if seen else None


def _hash(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _queue(owner: User, asked: CheckedSpec, check_of: Job | None) -> tuple[Job, StateChange]:
    spec, fields = asked.spec, _of_spec(asked)
    if not asked.allow_unfit and check_of is None:  # The job of a reference check has run before.
        require_fit(spec, fields["estimate"], asked.there)
    with transaction.atomic():
        job = Job.objects.create(
            owner=owner,
            name=spec.name,
            kind=spec.kind,
            device=get_slot_device(spec, asked.there),
            wanted_host=spec.resources.host or "",
            pool=spec.resources.pool or "",
            labels=sorted(set(spec.resources.labels)),
            project=spec.project,
            time_limit_s=spec.run.time_limit_s,
            idle_limit_s=spec.run.idle_limit_s,
            preemptible=spec.run.preemptible,
            engine=spec.resources.engine,
            chosen=asked.chosen,
            check_of=check_of,
            **fields,
        )
        queued = StateChange(job=job, attempt=1, status=Status.QUEUED, reason="submitted")
        write([queued])
        Dependency.objects.bulk_create(Dependency(job=job, needs=needs) for needs in dict.fromkeys(spec.after))
        record(owner.get_username(), "submit", "job", job.id, after={"name": job.name, "project": job.project})
    return job, queued


def _of_spec(asked: CheckedSpec) -> dict[str, Any]:
    """What of a job's row goes with its layout."""
    spec = asked.spec
    cluster, needed = predict_cluster(spec, asked.there), compute_slot_demand(spec)
    return {
        "spec": spec.model_dump(),
        "num_slots": needed.num_slots,
        "wide_unit": needed.units[0],
        "unit": needed.units[-1],
        "max_hosts": needed.max_hosts,
        "estimate": estimate_job(spec, cluster),
        "hardware": cluster.model_dump(mode="json", exclude={"runs"}),
    }


def submit_calibration(owner: User, host: Host) -> Job:
    """Queue a calibration of a host on all its slots.

    Raises:
        NotCalibratedError: not now, as `calibration_problems` says.
    """
    data = {
        "kind": "calibrate",
        "name": f"calibrate {host.name}",
        "model": {"preset": "gpt-tiny"},
        "layout": {"dp": host.slots},
        "train": {"global_batch": host.slots, "micro_batches": 1},
        "resources": {"device": host.device, "host": host.name},
    }
    try:
        job, _ = submit(owner, data)
    except SpecError as error:  # of a spec that the caller has not seen
        raise CalibrationError("; ".join(problem.message for problem in error.problems)) from error
    return job


def cancel(job: Job, by: str) -> bool:
    """Ask a job to end; True when this call did. One that never reached a host is cancelled at once."""
    with transaction.atomic():
        done = _cancel(job, f"cancelled by {by}")
        if done:
            record(by, "cancel", "job", job.id)
    return done


def _cancel(job: Job, reason: str) -> bool:
    by_rule = Job.objects.filter(id=job.id, attempt=job.attempt, status=Status.CANCELLING).exclude(stop="")
    if by_rule.update(stop=""):
        return True  # it was ending already; now nothing follows
    # Whether it had reached a host is decided by the database, not by what we read before.
    if lifecycle.change_status(job.id, job.attempt, Status.CANCELLING, reason, only_from=(Status.QUEUED,)):
        begun = Attempt.objects.filter(job=job, number=job.attempt, engine_ended__isnull=True)
        if begun.exclude(job__engine="hosts").exists():
            return True  # it waits in an engine's own queue, which says when it is out
        return lifecycle.change_status(job.id, job.attempt, Status.CANCELLED, reason)
    return lifecycle.change_status(job.id, job.attempt, Status.CANCELLING, reason)


def requeue(job: Job, by: str) -> bool:
    """Run again as a new attempt; True when this call did.

    Raises:
        DisprovedError: its run was.
    """
    if job.has_failed_verification():
        raise DisprovedError(VERIFICATION_FAILED)
    with transaction.atomic():
        done = lifecycle.requeue(job.id, f"queued again by {by}")
        if done:
            record(by, "queue again", "job", job.id)
    return done


def requeue_smaller(job: Job, by: str) -> bool:
    """Run again in the layout that fits what is left, from the newest checkpoint; True when this call did.

    Raises:
        NoOfferError: there is nothing to offer.
        DisprovedError: its run was.
        SpecError: it cannot run in it.
        BusyError: too much is planned at once.
    """
    if job.has_failed_verification():
        raise DisprovedError(VERIFICATION_FAILED)
    offer = find_smaller_layout(job)
    fields = _of_spec(check_spec(job.owner, apply_smaller_layout(job.spec, offer)))
    reason = f"queued again by {by} with {offer['words']} on {format_count(offer['ranks'], 'rank')}: {offer['why']}"
    with transaction.atomic():
        lifecycle.lock_job(job.id)
        if not Job.objects.filter(id=job.id, attempt=job.attempt, status=job.status).update(**fields):
            return False
        # One that waits has not begun its attempt: it waits on, in another layout.
        if job.status != Status.QUEUED and not lifecycle.requeue(job.id, reason):
            raise AssertionError("the locked job can be queued again")
        record(by, "run smaller", "job", job.id, after={"layout": offer["words"], "ranks": offer["ranks"]})
    return True


class CalibrationError(Exception):
    """The host cannot be calibrated now."""


class HostConnectedError(Exception):
    """A host that speaks, or a supervisor on it, is not given up: its jobs can be cancelled."""

    def __init__(self, host: Host, heard: datetime) -> None:
        who = f"Host {host.name}" if heard == host.last_seen else f"A supervisor on host {host.name}"
        super().__init__(f"{who} had contact at {heard.isoformat()}. Cancel the jobs on the host instead.")


def mark_host_lost(host: Host, by: str) -> int:
    """Declare a silent host gone: its attempts are LOST, its slots free; returns how many attempts.

    If it comes back with ranks still running, they are told to end, and what they hold is not placed upon.

    Raises:
        HostConnectedError: it, or a supervisor there of what has not ended, was heard of within 30 s.
    """
    since = timezone.now() - HOST_SILENT_AFTER
    with transaction.atomic():
        held = Host.objects.select_for_update(no_key=True).get(pk=host.pk)
        unended = Member.objects.filter(host=held, ended__isnull=True)
        supervisor = unended.aggregate(heard=Max("heard"))["heard"]
        last = max(held.last_seen, supervisor or held.last_seen)
        if last >= since:
            raise HostConnectedError(held, last)
        Host.objects.filter(pk=host.pk).update(given_up=timezone.now())
        members = list(unended.select_related("attempt"))
        for member in members:
            attempt_completion.lose_member(member, f"host {host.name} was marked as lost by {by}")
        record(by, "give up", "host", host.name, after={"lost": len(members)})
    return len(members)
