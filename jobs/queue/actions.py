"""Submit, cancel, and queue jobs. Each action is one transaction."""

from __future__ import annotations

import hashlib
import json
import logging
from datetime import datetime
from typing import Any, NamedTuple

from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.db.models import Max
from django.utils import timezone

from jobs.core.audit import record
from jobs.core.errors import get_trace_id
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
from jobs.people.notifications.outbox import add_state_changes
from jobs.planning.admission import find_board_problems
from jobs.planning.auto_layout import apply_smaller_layout, find_smaller_layout, resolve_auto_layout
from jobs.planning.checkpoints import find_checkpoint_problems
from jobs.planning.drafts import estimate_job
from jobs.planning.fit import require_fit, split_allow_unfit
from jobs.planning.hosts import AvailableHost, get_slot_device, list_hosts, predict_cluster
from jobs.planning.uploads import find_upload
from jobs.queue import attempt_completion, lifecycle
from planner.cost.estimate import parse_plannable
from planner.facts.kinds import compute_slot_demand
from planner.facts.spec import JobSpec
from planner.facts.spec_rules import find_unsupported_fields
from planner.facts.validation import SpecError, format_count
from planner.search.auto_layout import AutoLayout

log = logging.getLogger(__name__)


class KeyReusedError(Exception):
    """An Idempotency-Key came with another request body."""


class DisprovedError(Exception):
    """A job whose verification failed cannot be queued again."""


class CalibrationError(Exception):
    """The host cannot be calibrated now."""


class HostConnectedError(Exception):
    """A host with recent contact cannot be marked as lost, but its jobs can be cancelled."""

    def __init__(self, host: Host, last_contact: datetime) -> None:
        who = f"Host {host.name}" if last_contact == host.last_seen else f"A supervisor on host {host.name}"
        super().__init__(f"{who} had contact at {last_contact.isoformat()}. Cancel the jobs on the host instead.")


class CheckedSpec(NamedTuple):
    """A valid spec with the hosts that were available.

    `auto_layout`: result for the layout "auto". `allow_unfit`: queue the job even if its memory does not fit.
    """

    spec: JobSpec
    hosts: list[AvailableHost]
    auto_layout: AutoLayout | None
    allow_unfit: bool = False


def check_spec(owner: User, data: object) -> CheckedSpec:
    """Parse a spec, and check it against the hosts and the jobs that the owner may see.

    Raises:
        SpecError: With all problems.
        BusyError: Too many layouts are being searched.
    """
    data, allow_unfit = split_allow_unfit(data)
    data, auto_layout = resolve_auto_layout(data)
    spec = parse_plannable(data)
    hosts = list_hosts(spec)
    problems = [
        *find_board_problems(owner, spec, hosts),
        *find_unsupported_fields(spec),
        *find_checkpoint_problems(owner, spec),
    ]
    if problems:
        raise SpecError(problems)
    return CheckedSpec(spec, hosts, auto_layout, allow_unfit)


def submit(
    owner: User, data: object, *, key: str | None = None, request_body: object = None, check_of: Job | None = None
) -> tuple[Job, StateChange | None]:
    """Queue a job. Return it with its state change, or with None if the same request came before.

    Args:
        key: Idempotency-Key of the request.
        request_body: Body to compare for `key`, if it is not `data`.
        check_of: Run that the job checks, from `jobs.queue.derived_jobs`.

    Raises:
        SpecError: The spec cannot run.
        UnfitError: Its memory does not fit, and `data` has no `allow_unfit`.
        BusyError: Too many layouts are being searched.
        KeyReusedError: `key` was used with another body.
    """
    if key is None:
        return _queue(owner, check_spec(owner, data), check_of)
    body = data if request_body is None else request_body
    if earlier := find_idempotent_job(owner, key, body):
        return earlier, None
    checked = check_spec(owner, data)
    try:
        with transaction.atomic():
            job, queued = _queue(owner, checked, check_of)
            IdempotentRequest.objects.create(user=owner, key=key, body_hash=_hash(body), job=job)
    except IntegrityError:  # a concurrent request with the same key was first
        first = find_idempotent_job(owner, key, body)
        if first is None:
            raise
        return first, None
    return job, queued


def find_idempotent_job(owner: User, key: str, body: object) -> Job | None:
    """Return the job of an earlier request with this key and body.

    Raises:
        KeyReusedError: The earlier request had another body.
    """
    request = IdempotentRequest.objects.filter(user=owner, key=key).select_related("job__owner").first()
    if request is not None and request.body_hash != _hash(body):
        raise KeyReusedError
    return request.job if request else None


def _hash(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _queue(owner: User, checked: CheckedSpec, check_of: Job | None) -> tuple[Job, StateChange]:
    spec, layout_fields = checked.spec, _build_layout_fields(checked)
    if not checked.allow_unfit and check_of is None:  # The job of a reference check has run before.
        require_fit(spec, layout_fields["estimate"], checked.hosts)
    with transaction.atomic():
        job = Job.objects.create(
            owner=owner,
            name=spec.name,
            kind=spec.kind,
            device=get_slot_device(spec, checked.hosts),
            wanted_host=spec.resources.host or "",
            pool=spec.resources.pool or "",
            labels=sorted(set(spec.resources.labels)),
            project=spec.project,
            time_limit_s=spec.run.time_limit_s,
            idle_limit_s=spec.run.idle_limit_s,
            preemptible=spec.run.preemptible,
            engine=spec.resources.engine,
            chosen=checked.auto_layout,
            check_of=check_of,
            upload=find_upload(owner, spec),
            trace_id=get_trace_id(),
            **layout_fields,
        )
        queued = StateChange(job=job, attempt=1, status=Status.QUEUED, reason="submitted")
        add_state_changes([queued])
        Dependency.objects.bulk_create(Dependency(job=job, needs=needs) for needs in dict.fromkeys(spec.after))
        record(owner.get_username(), "submit", "job", job.id, after={"name": job.name, "project": job.project})
    log.info("submitted %s (trace %s)", job.id, job.trace_id, extra={"job": job.id, "trace_id": job.trace_id})
    return job, queued


def _build_layout_fields(checked: CheckedSpec) -> dict[str, Any]:
    """Return the columns of a job that depend on its layout."""
    spec = checked.spec
    cluster, demand = predict_cluster(spec, checked.hosts), compute_slot_demand(spec)
    return {
        "spec": spec.model_dump(),
        "num_slots": demand.num_slots,
        "wide_unit": demand.units[0],
        "unit": demand.units[-1],
        "max_hosts": demand.max_hosts,
        "estimate": estimate_job(spec, cluster),
        "hardware": cluster.model_dump(mode="json", exclude={"runs", "measured_steps"}),
    }


def submit_calibration(owner: User, host: Host) -> Job:
    """Queue a calibration of a host on all its slots.

    Raises:
        CalibrationError: The host cannot be calibrated now.
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
    except SpecError as error:  # without field names, because the user has not seen the spec
        raise CalibrationError("; ".join(problem.message for problem in error.problems)) from error
    return job


def cancel(job: Job, by: str) -> bool:
    """Start to end a job, and return whether this call did it. A job that never reached a host ends at once."""
    with transaction.atomic():
        done = _cancel(job, f"cancelled by {by}")
        if done:
            record(by, "cancel", "job", job.id)
    return done


def _cancel(job: Job, reason: str) -> bool:
    stopping = Job.objects.filter(id=job.id, attempt=job.attempt, status=Status.CANCELLING).exclude(stop="")
    if stopping.update(stop=""):
        return True  # it was ending by a rule, and now it is not queued again
    # The database decides whether the job reached a host, because `job` may be outdated.
    if not lifecycle.change_status(job.id, job.attempt, Status.CANCELLING, reason, only_from=(Status.QUEUED,)):
        return lifecycle.change_status(job.id, job.attempt, Status.CANCELLING, reason)
    attempts = Attempt.objects.filter(job=job, number=job.attempt, engine_ended__isnull=True)
    if attempts.exclude(job__engine="hosts").exists():
        return True  # it is pending in Slurm, which reports its end
    return lifecycle.change_status(job.id, job.attempt, Status.CANCELLED, reason)


def requeue(job: Job, by: str) -> bool:
    """Queue a new attempt, and return whether this call did it.

    Raises:
        DisprovedError: The verification of the run failed.
    """
    if job.has_failed_verification():
        raise DisprovedError(VERIFICATION_FAILED)
    with transaction.atomic():
        done = lifecycle.requeue(job.id, f"queued again by {by}")
        if done:
            record(by, "queue again", "job", job.id)
    return done


def requeue_smaller(job: Job, by: str) -> bool:
    """Queue the job in a layout that fits the remaining hosts, and return whether this call did it.

    Raises:
        NoOfferError: No smaller layout exists.
        DisprovedError: The verification of the run failed.
        SpecError: The job cannot run in the smaller layout.
        BusyError: Too many layouts are being searched.
    """
    if job.has_failed_verification():
        raise DisprovedError(VERIFICATION_FAILED)
    offer = find_smaller_layout(job)
    fields = _build_layout_fields(check_spec(job.owner, apply_smaller_layout(job.spec, offer)))
    reason = f"queued again by {by} with {offer['words']} on {format_count(offer['ranks'], 'rank')}: {offer['why']}"
    with transaction.atomic():
        lifecycle.lock_job(job.id)
        if not Job.objects.filter(id=job.id, attempt=job.attempt, status=job.status).update(**fields):
            return False
        # A queued job keeps its attempt, because that has not begun.
        if job.status != Status.QUEUED and not lifecycle.requeue(job.id, reason):
            raise AssertionError("the locked job can be queued again")
        record(by, "run smaller", "job", job.id, after={"layout": offer["words"], "ranks": offer["ranks"]})
    return True


def mark_host_lost(host: Host, by: str) -> int:
    """Mark a silent host as lost, and return the number of its attempts, which become LOST.

    If the host comes back, its ranks are stopped before their slots are used again.

    Raises:
        HostConnectedError: The host, or a supervisor of an unended attempt, had contact within 30 s.
    """
    since = timezone.now() - HOST_SILENT_AFTER
    with transaction.atomic():
        locked = Host.objects.select_for_update(no_key=True).get(pk=host.pk)
        unended = Member.objects.filter(host=locked, ended__isnull=True)
        supervisor_contact = unended.aggregate(latest=Max("heard"))["latest"]
        last_contact = max(locked.last_seen, supervisor_contact or locked.last_seen)
        if last_contact >= since:
            raise HostConnectedError(locked, last_contact)
        Host.objects.filter(pk=host.pk).update(given_up=timezone.now())
        members = list(unended.select_related("attempt"))
        for member in members:
            attempt_completion.lose_member(member, f"host {host.name} was marked as lost by {by}")
        record(by, "give up", "host", host.name, after={"lost": len(members)})
    return len(members)
