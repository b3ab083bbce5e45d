"""Where a job's own layout no longer fits the hosts that are left: the best one that does, with its predicted speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from jobs.models import Job, Status
from jobs.planning.auto import rooms_of
from jobs.planning.hardware import by_model, gang_cluster
from jobs.planning.planners import ask
from jobs.planning.room import room_problems
from jobs.planning.shapes import SmallerLayout
from jobs.planning.there import There, hosts_there, labels_asked
from planner.facts.kinds import get_kind_rules
from planner.facts.spec import JobSpec
from planner.facts.validation import SpecError, format_count
from planner.search.auto_layout import draft_of

MAY_CHANGE = (Status.FAILED, Status.LOST, Status.CANCELLED, Status.QUEUED)


class NoOfferError(Exception):
    """There is nothing to offer; `field` is why."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def smaller(job: Job) -> SmallerLayout:
    """The layout that is predicted to be fastest on what is left, for a job that does not run now.

    Raises:
        NoOfferError: its own layout fits, it runs, or nothing fits.
        BusyError: too much is planned at once, or this takes too long.
    """
    try:
        spec = JobSpec.model_validate(job.spec)
    except ValidationError:
        raise NoOfferError(
            "spec", "`spec` is from an older version that this version cannot plan. Submit a new job."
        ) from None
    if not get_kind_rules(job.spec).trains:
        raise NoOfferError("kind", f"`kind` is {job.kind}, which has no layout to change. Use a training job.")
    if job.status not in MAY_CHANGE:
        raise NoOfferError("status", f"`status` is {job.status}. Change the layout after the attempt has ended.")
    if spec.resources.engine != "hosts":
        raise NoOfferError(
            "resources.engine",
            "`resources.engine` is slurm, and the free Slurm nodes are unknown. Submit a new job with another layout.",
        )
    labels = labels_asked(spec.resources)
    there = [host for host in hosts_there(spec) if labels <= host.labels]
    hosts = _left(spec, there)
    if not hosts:
        having = f" with the labels {', '.join(sorted(labels))}" if labels else ""
        text = f"No {spec.resources.device.upper()} host{having} accepts jobs now. Add a host, or undrain a host."
        raise NoOfferError("layout", text)
    problems = room_problems(spec, there, now=True)
    if not problems:
        raise NoOfferError("layout", "The current layout already fits the available hosts. Retry the job.")
    fitting = _fitting(spec, hosts, there)
    newest = job.attempts.exclude(checkpoint="").order_by("-number").values_list("checkpoint", flat=True).first()
    return SmallerLayout(
        why=problems[0].message,
        layout=fitting["layout"],
        words=fitting["told"]["words"],
        ranks=fitting["told"]["ranks"],
        micro_batches=fitting["micro_batches"],
        step_s=fitting["told"]["step_s"],
        was_step_s=job.estimate.get("time", {}).get("step_s"),
        checkpoint=newest or "",
    )


def is_stranded(job: Job) -> bool:
    """Whether it waits for hosts that are not there: none that take jobs now could hold it, were they empty."""
    try:
        spec = JobSpec.model_validate(job.spec)
    except ValidationError:
        return False
    there = hosts_there(spec)
    return not any(host.live and not host.drained for host in there) or bool(room_problems(spec, there, now=True))


def changed_spec(spec: dict[str, Any], offer: SmallerLayout) -> dict[str, Any]:
    """The job's spec in the layout that was offered."""
    return {**spec, "layout": offer["layout"], "train": {**spec["train"], "micro_batches": offer["micro_batches"]}}


def _left(spec: JobSpec, there: Sequence[There]) -> list[There]:
    """Hosts of the model that has most slots together; a gang is of one."""
    wanted, device = spec.resources.host, spec.resources.device
    left = [host for host in there if host.takes and host.device == device and wanted in (None, host.name)]
    return max(by_model(left), key=lambda hosts: sum(host.slots for host in hosts), default=[])


def _fitting(spec: JobSpec, hosts: Sequence[There], there: Sequence[There]) -> Any:
    """With tp inside a host, and on as many ranks as can be placed: one fewer as long as that many cannot."""
    total = sum(host.slots for host in hosts)
    draft = draft_of(spec.model_dump())
    cluster = gang_cluster(hosts, spec)
    rooms, _ = rooms_of(hosts, spec.resources.max_hosts)
    where = {"rooms": rooms.alone, "gangs": rooms.gangs, "runnable": True}
    for ranks in range(total, 0, -1):
        try:
            found = ask("chosen", draft, cluster, {"auto": {"max_ranks": ranks}, **where})
        except SpecError as error:
            raise NoOfferError("layout", error.problems[0].message) from None
        layout = JobSpec.model_validate({**spec.model_dump(), "layout": found["layout"]})
        if not room_problems(layout, there, now=True):
            return found
    available = f"{format_count(total, 'slot')} on {format_count(len(hosts), 'host')}"
    raise NoOfferError("layout", f"No layout fits the available {available}. Add a host.")
