"""What hosts there are for a job, asked once for all that its submit has to know of them."""

from __future__ import annotations

from typing import NamedTuple

from django.db.models import BooleanField, Exists, ExpressionWrapper, OuterRef, Q
from django.db.models.expressions import Combinable
from django.utils import timezone

from jobs.models import HOST_SILENT_AFTER, Host, HostRun, Pool
from planner.facts.spec import JobSpec, Resources

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
    """Hosts of the job's device, and the one that it names whatever its device, the largest first; none where another
    engine places it."""
    if spec.resources.engine != "hosts":
        return []
    calibrated = ExpressionWrapper(CALIBRATED, BooleanField())
    asked = Q(device=spec.resources.device) | Q(name=spec.resources.host)
    hosts = Host.objects.present().filter(asked).annotate(calibrated=calibrated)
    rows = hosts.order_by("-slots", "name").values_list(
        "pk", "name", "slots", "device_name", "drained", "last_seen", "calibrated", "device", "memory_bytes", "labels"
    )
    since = timezone.now() - HOST_SILENT_AFTER
    there = [
        There(pk, name, slots, device_name, drained, last_seen >= since, known, device, memory_bytes, frozenset(labels))
        for pk, name, slots, device_name, drained, last_seen, known, device, memory_bytes, labels in rows
    ]
    return _with_runs(there) if there else there


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
