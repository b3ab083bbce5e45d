"""Layouts that Meshboard chooses: for a spec with the layout "auto", and for a job that no longer fits its hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from jobs.models import Host, Job, Status
from jobs.planning.admission import find_capacity_problems, find_host_problems
from jobs.planning.hosts import (
    AnyHost,
    AvailableHost,
    build_cluster_like,
    build_gang_cluster,
    build_host_cluster,
    get_cluster,
    get_required_labels,
    group_by_model,
    list_hosts,
)
from jobs.planning.measured_runs import OLD_SPEC
from jobs.planning.planner_processes import run_task
from jobs.planning.schemas import SmallerLayout
from planner.cost.measured_steps import MEASURED_STEPS, StepMeasurement, serialize_steps
from planner.facts.kinds import get_kind_rules
from planner.facts.spec import JobSpec
from planner.facts.spec_rules import find_unsupported_fields
from planner.facts.validation import Problem, SpecError, format_count
from planner.hardware.cluster import Cluster
from planner.search.auto_layout import (
    FIELD,
    AutoLayout,
    AutoSpec,
    Capacity,
    HostCapacity,
    HostGang,
    parse_auto_spec,
    parse_draft,
)

RELAYOUT_STATES = (Status.FAILED, Status.LOST, Status.CANCELLED, Status.QUEUED)


def resolve_auto_layout(
    data: Any, cluster_name: object = None, *, to_run: bool = True, measured_steps: Sequence[StepMeasurement] = ()
) -> tuple[Any, AutoLayout | None]:
    """Replace the layout "auto" in a spec, and return the choice. Another spec is returned unchanged, with None.

    Args:
        cluster_name: Cluster to choose for if the spec names none.
        to_run: Refuse fields that the trainer does not support.
        measured_steps: Steps that correct the step times.

    Raises:
        SpecError: No layout can be chosen.
        BusyError
    """
    auto = parse_auto_spec(data)
    if auto is None:
        return data, None
    draft = parse_draft(data)
    unsupported = find_unsupported_fields(draft)
    if to_run and unsupported:
        raise SpecError(unsupported)
    cluster, rooms = _get_placements(draft, auto, auto.cluster or cluster_name)
    options = {"auto": auto.model_dump(), "rooms": rooms.hosts, "gangs": rooms.gangs, "runnable": not unsupported}
    options[MEASURED_STEPS] = serialize_steps(measured_steps)
    choice = run_task("choose", draft, cluster, options)
    train = {**data.get("train", {}), "micro_batches": choice["micro_batches"]}
    return {**data, "layout": choice["layout"], "train": train}, choice["told"]


def _get_placements(draft: JobSpec, auto: AutoSpec, cluster_name: object) -> tuple[Cluster, Capacity]:
    """Return the cluster for step times, and the hosts and gangs on which ranks can be placed."""
    if cluster_name:
        cluster = get_cluster(cluster_name, draft)
        slots = max(cluster.per_node, auto.ranks or auto.max_ranks or 0)
        return cluster, Capacity([HostCapacity(slots, cluster.accelerator.memory_bytes)])
    if draft.resources.engine != "hosts":
        message = "`layout.auto` needs known hosts, but Slurm nodes are unknown. Set `layout.auto.cluster` or `layout`."
        raise SpecError([Problem(FIELD, message)])
    device, wanted = draft.resources.device, draft.resources.host
    rows = Host.objects.accepting_jobs().filter(device=device).order_by("-slots", "name")
    if wanted is not None:
        rows = rows.filter(name=wanted)
    labels = get_required_labels(draft.resources)
    hosts = [host for host in rows if labels <= {*host.labels}]
    if not hosts:
        if problems := find_host_problems(draft, list_hosts(draft)):
            raise SpecError(problems)
        who = f"Host {wanted}" if wanted is not None else f"A {device.upper()} host"
        who += f" with the labels {', '.join(sorted(labels))}" if labels else ""
        message = f"{who} is not connected, so no layout can be chosen. Set `layout.auto.cluster` or `layout`."
        raise SpecError([Problem(FIELD, message)])
    rooms, gangs = build_placements(hosts, draft.resources.max_hosts)
    largest = max(gangs, key=lambda gang: sum(host.slots for host in gang), default=[])
    return build_cluster_like(largest[0], len(largest)) if largest else build_host_cluster(hosts[0]), rooms


def build_placements(hosts: Sequence[AnyHost], max_hosts: int | None) -> tuple[Capacity, list[list[AnyHost]]]:
    """Return the hosts and gangs on which ranks can be placed, and the hosts of each gang."""
    gangs = [gang for model in group_by_model(hosts) if len(gang := model[:max_hosts]) > 1]
    together = [HostGang(tuple(h.slots for h in gang), min(h.memory_bytes for h in gang)) for gang in gangs]
    return Capacity([HostCapacity(host.slots, host.memory_bytes) for host in hosts], together), gangs


class NoOfferError(Exception):
    """No other layout is offered. `field` names the cause."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def find_smaller_layout(job: Job) -> SmallerLayout:
    """Return the fastest layout on the available hosts for a job that does not run and does not fit.

    Raises:
        NoOfferError: The job runs, its layout fits, or no layout fits.
        BusyError
    """
    try:
        spec = JobSpec.model_validate(job.spec)
    except ValidationError:
        raise NoOfferError("spec", OLD_SPEC) from None
    if not get_kind_rules(job.spec).trains:
        raise NoOfferError("kind", f"`kind` is {job.kind}, which has no layout to change. Use a training job.")
    if job.status not in RELAYOUT_STATES:
        raise NoOfferError("status", f"`status` is {job.status}. Change the layout after the attempt has ended.")
    if spec.resources.engine != "hosts":
        message = "is slurm, and the free Slurm nodes are unknown. Submit a new job with another layout."
        raise NoOfferError("resources.engine", f"`resources.engine` {message}")
    labels = get_required_labels(spec.resources)
    hosts = [host for host in list_hosts(spec) if labels <= host.labels]
    gang = _get_largest_gang(spec, hosts)
    if not gang:
        with_labels = f" with the labels {', '.join(sorted(labels))}" if labels else ""
        message = (
            f"No {spec.resources.device.upper()} host{with_labels} accepts jobs now. Add a host, or undrain a host."
        )
        raise NoOfferError("layout", message)
    problems = find_capacity_problems(spec, hosts, now=True)
    if not problems:
        raise NoOfferError("layout", "The current layout already fits the available hosts. Retry the job.")
    choice = _choose_smaller_layout(spec, gang, hosts)
    checkpoint = job.attempts.exclude(checkpoint="").order_by("-number").values_list("checkpoint", flat=True).first()
    return SmallerLayout(
        why=problems[0].message,
        layout=choice["layout"],
        words=choice["told"]["words"],
        ranks=choice["told"]["ranks"],
        micro_batches=choice["micro_batches"],
        step_s=choice["told"]["step_s"],
        was_step_s=job.estimate.get("time", {}).get("step_s"),
        checkpoint=checkpoint or "",
    )


def is_stranded(job: Job) -> bool:
    """Return whether no hosts that accept jobs now could hold a job, even without other jobs."""
    try:
        spec = JobSpec.model_validate(job.spec)
    except ValidationError:
        return False
    hosts = list_hosts(spec)
    return not any(host.accepts_jobs for host in hosts) or bool(find_capacity_problems(spec, hosts, now=True))


def apply_smaller_layout(spec: dict[str, Any], offer: SmallerLayout) -> dict[str, Any]:
    """Return a stored spec with the offered layout."""
    return {**spec, "layout": offer["layout"], "train": {**spec["train"], "micro_batches": offer["micro_batches"]}}


def _get_largest_gang(spec: JobSpec, hosts: Sequence[AvailableHost]) -> list[AvailableHost]:
    """Return the hosts of the hardware model with the most slots in total."""
    wanted, device = spec.resources.host, spec.resources.device
    suitable = [one for one in hosts if one.accepts_jobs and one.device == device and wanted in (None, one.name)]
    return max(group_by_model(suitable), key=lambda gang: sum(host.slots for host in gang), default=[])


def _choose_smaller_layout(spec: JobSpec, gang: Sequence[AvailableHost], hosts: Sequence[AvailableHost]) -> Any:
    """Choose a layout on the largest number of ranks that can be placed."""
    num_slots = sum(host.slots for host in gang)
    draft = parse_draft(spec.model_dump())
    cluster = build_gang_cluster(gang, spec)
    rooms, _ = build_placements(gang, spec.resources.max_hosts)
    for num_ranks in range(num_slots, 0, -1):
        options = {"auto": {"max_ranks": num_ranks}, "rooms": rooms.hosts, "gangs": rooms.gangs, "runnable": True}
        try:
            choice = run_task("choose", draft, cluster, options)
        except SpecError as error:
            raise NoOfferError("layout", error.problems[0].message) from None
        candidate = JobSpec.model_validate({**spec.model_dump(), "layout": choice["layout"]})
        if not find_capacity_problems(candidate, hosts, now=True):
            return choice
    available = f"{format_count(num_slots, 'slot')} on {format_count(len(gang), 'host')}"
    raise NoOfferError("layout", f"No layout fits the available {available}. Add a host.")
