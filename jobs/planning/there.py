"""What hosts there are for a job, asked once for all that its submit has to know of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

from django.db.models import BooleanField, Exists, ExpressionWrapper, OuterRef, Q
from django.db.models.expressions import Combinable
from django.utils import timezone

from jobs.models import HOST_SILENT_AFTER, Host, HostRun, Pool
from planner.facts.kinds import KINDS
from planner.facts.resources import Device, Resources
from planner.facts.spec import JobSpec

CALIBRATED = Q(profile__isnull=False)


class There(NamedTuple):
    """A host that staff did not remove. `live`: heard of lately; `known`: a calibration or a run measured it."""

    pk: int
    name: str
    slots: int
    device_name: str
    drained: bool
    live: bool
    known: bool
    device: str
    memory_bytes: int  # of a slot
    labels: frozenset[str]

    @property
    def takes(self) -> bool:
        """Whether it takes jobs now."""
        return self.live and not self.drained


def was_measured() -> Q | Combinable:
    """Of a host: whether a calibration measured it, or something ran on it that was worth keeping."""
    ran = HostRun.objects.filter(host=OuterRef("pk"), device_name=OuterRef("device_name"))
    return CALIBRATED | Exists(ran)


def hosts_there(spec: JobSpec) -> list[There]:
    """Hosts of the job's device, and the one that it names whatever its device, the largest first; of a dry run all.
    None where another engine places it."""
    if spec.resources.engine != "hosts":
        return []
    calibrated = ExpressionWrapper(CALIBRATED, BooleanField())
    asked = Q(device=spec.resources.device) | Q(name=spec.resources.host)
    present = Host.objects.present().annotate(calibrated=calibrated)
    hosts = present if KINDS[spec.kind].shares_one_slot else present.filter(asked)
    rows = hosts.order_by("-slots", "name").values_list(
        "pk", "name", "slots", "device_name", "drained", "last_seen", "calibrated", "device", "memory_bytes", "labels"
    )
    since = timezone.now() - HOST_SILENT_AFTER
    there = [
        There(pk, name, slots, device_name, drained, last_seen >= since, known, device, memory_bytes, frozenset(labels))
        for pk, name, slots, device_name, drained, last_seen, known, device, memory_bytes, labels in rows
    ]
    return _with_runs(there) if there else there


def slot_device(spec: JobSpec, there: Sequence[There]) -> Device:
    """The device whose slots the job takes: the spec's. A dry run computes on none, and where the host that it names,
    or each that there is, has another, it takes that.

    `there`: as `hosts_there` has them.
    """
    wanted, asked = spec.resources.host, spec.resources.device
    if not KINDS[spec.kind].shares_one_slot:
        return asked
    found = [host.device for host in there if wanted == host.name] or [host.device for host in there]
    return asked if asked in found or not found else cast(Device, found[0])


def _with_runs(there: list[There]) -> list[There]:
    """Known also where something ran that was worth keeping. By itself: as part of the other statement it took as long
    to put together as all else of it."""
    runs = HostRun.objects.filter(host__in=[host.pk for host in there]).order_by()
    ran = set(runs.values_list("host", "device_name").distinct())
    return [host._replace(known=host.known or (host.pk, host.device_name) in ran) for host in there]


def labels_asked(resources: Resources) -> frozenset[str]:
    """What a host must have that takes the job: its own, and its pool's; of a pool that is not there nothing, which is
    refused by its own name."""
    of_pool: list[str] | None = None
    if resources.pool:
        of_pool = Pool.objects.filter(name=resources.pool).values_list("labels", flat=True).first()
    return frozenset({*resources.labels, *(of_pool or ())})
