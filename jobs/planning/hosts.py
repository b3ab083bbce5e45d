"""Hosts that a job can use, and the clusters that the planner derives from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar, cast

from django.db.models import BooleanField, Exists, ExpressionWrapper, OuterRef, Q, QuerySet
from django.db.models.expressions import Combinable
from django.utils import timezone
from pydantic import ValidationError

from jobs.core.text import is_storable
from jobs.models import HOST_SILENT_AFTER, Host, HostRun, Pool, find_host_problem
from jobs.planning.measured_runs import load_measured_runs
from planner.cost.estimate import get_default_cluster
from planner.cost.learning import apply_runs
from planner.facts.kinds import KINDS, SlotDemand, compute_slot_demand
from planner.facts.resources import Device, Resources
from planner.facts.spec import JobSpec
from planner.facts.validation import Problem, SpecError
from planner.hardware.calibration import build_cluster
from planner.hardware.catalog import CLUSTERS, DEFAULT_CLUSTER, find_cluster, use_cores
from planner.hardware.cluster import NO_DATA_SHEET, Cluster
from planner.hardware.own_accelerator import OWN_NAME, OWN_PREFIX, parse_own_cluster
from planner.hardware.profile import HostProfile

HOST_PREFIX = "host:"
CALIBRATED = Q(profile__isnull=False)


class AvailableHost(NamedTuple):
    """Host of the board.

    Args:
        is_live: The host sent a heartbeat recently.
        is_measured: A calibration or a run measured the host.
        memory_bytes: Memory per slot.
        problem: Reason why the host is sick.
    """

    pk: int
    name: str
    slots: int
    device_name: str
    drained: bool
    is_live: bool
    is_measured: bool
    device: str
    memory_bytes: int
    labels: frozenset[str]
    problem: str = ""

    @property
    def accepts_jobs(self) -> bool:
        return self.is_live and not self.drained and not self.problem


AnyHost = TypeVar("AnyHost", Host, AvailableHost)


def list_hosts(spec: JobSpec) -> list[AvailableHost]:
    """Return the hosts with the device or the name that a job requests, largest first.

    A dry run can use all hosts. Another engine than Meshboard's hosts has none.
    """
    if spec.resources.engine != "hosts":
        return []
    hosts = Host.objects.present().annotate(calibrated=ExpressionWrapper(CALIBRATED, BooleanField()))
    if not KINDS[spec.kind].shares_one_slot:
        hosts = hosts.filter(Q(device=spec.resources.device) | Q(name=spec.resources.host))
    rows = hosts.order_by("-slots", "name").values_list(
        *("pk", "name", "slots", "device_name", "drained", "last_seen", "calibrated", "device", "memory_bytes"),
        *("labels", "problem", "closed_until", "closed_reason"),
    )
    now = timezone.now()
    found = [
        AvailableHost(
            pk,
            name,
            slots,
            model,
            drained,
            seen >= now - HOST_SILENT_AFTER,
            calibrated,
            device,
            memory,
            frozenset(labels),
            find_host_problem(problem, until, why, now),
        )
        for pk, name, slots, model, drained, seen, calibrated, device, memory, labels, problem, until, why in rows
    ]
    if not found:
        return []
    # A separate query: as part of the query above, this one doubled the time to build it.
    runs = HostRun.objects.filter(host__in=[host.pk for host in found]).order_by()
    with_runs = set(runs.values_list("host", "device_name").distinct())
    return [host._replace(is_measured=host.is_measured or (host.pk, host.device_name) in with_runs) for host in found]


def build_measured_filter() -> Q | Combinable:
    """Return a filter for hosts that a calibration or a run measured."""
    runs = HostRun.objects.filter(host=OuterRef("pk"), device_name=OuterRef("device_name"))
    return CALIBRATED | Exists(runs)


def get_measured_hosts() -> QuerySet[Host]:
    """Return the hosts that a calibration or a run measured."""
    return Host.objects.present().filter(build_measured_filter()).order_by("name")


def get_slot_device(spec: JobSpec, hosts: Sequence[AvailableHost]) -> Device:
    """Return the device whose slots a job occupies.

    A dry run computes on no device, so it takes any device that its hosts have.
    """
    device = spec.resources.device
    if not KINDS[spec.kind].shares_one_slot:
        return device
    devices = [host.device for host in hosts if spec.resources.host == host.name] or [host.device for host in hosts]
    return device if device in devices or not devices else cast(Device, devices[0])


def get_required_labels(resources: Resources) -> frozenset[str]:
    """Return the labels of a job and its pool, which a host needs to accept the job."""
    pool_labels: list[str] | None = None
    if resources.pool:
        pool_labels = Pool.objects.filter(name=resources.pool).values_list("labels", flat=True).first()
    return frozenset({*resources.labels, *(pool_labels or ())})


def group_by_model(hosts: Iterable[AnyHost]) -> list[list[AnyHost]]:
    """Group hosts by hardware model, because one run uses hosts of one model. Largest hosts are first."""
    models: dict[str, list[AnyHost]] = {}
    for host in sorted(hosts, key=lambda host: (-host.slots, host.name)):
        models.setdefault(host.device_name, []).append(host)
    return list(models.values())


def get_cluster(name: object, spec: JobSpec) -> Cluster:
    """Return a named cluster. Without a name, predict the cluster of a job.

    Args:
        name: Name in the catalog, `host:NAME` for a measured host, or `own:FIELD=NUMBER,...` for an own accelerator.

    Raises:
        SpecError: The cluster is unknown, or a number of an own accelerator is invalid.
    """
    if name is None or name == "":
        return predict_cluster(spec, list_hosts(spec))
    if not isinstance(name, str) or not is_storable(name):
        raise SpecError([Problem("cluster", "`cluster` is not a text. Use a cluster name from /clusters.")])
    if name.startswith(HOST_PREFIX):
        host = get_measured_hosts().filter(name=name.removeprefix(HOST_PREFIX)).first()
        if host is not None:
            return build_host_cluster(host)
        message = "but this host has no calibration and no runs. Calibrate the host first."
        raise SpecError([Problem("cluster", f"`cluster` is {name[:60]!r}, {message}")])
    if name.startswith(OWN_PREFIX):
        return parse_own_cluster(name)
    if name not in CLUSTERS:
        message = f"which is an unknown cluster. Use one of {', '.join(CLUSTERS)}."
        raise SpecError([Problem("cluster", f"`cluster` is {name[:60]!r}, {message}")])
    return CLUSTERS[name]


def predict_cluster(spec: JobSpec, hosts: Sequence[AvailableHost]) -> Cluster:
    """Return the cluster on which a job most likely runs.

    Hosts that accept jobs now are preferred to drained hosts, and drained hosts to silent hosts. Without a suitable
    host, and for another engine, the cluster comes from a data sheet.
    """
    resources, labels = spec.resources, get_required_labels(spec.resources)
    suitable = [
        host
        for host in hosts
        if host.device == resources.device and resources.host in (None, host.name) and labels <= host.labels
    ]
    demand = compute_slot_demand(spec)
    accepting, live = [one for one in suitable if one.accepts_jobs], [one for one in suitable if one.is_live]
    for candidates in (accepting, live, suitable):
        if gang := _choose_gang(candidates, demand):
            return build_gang_cluster(gang, spec)
    return get_default_cluster(spec)


def _choose_gang(hosts: Sequence[AvailableHost], demand: SlotDemand) -> Sequence[AvailableHost]:
    """Return the largest measured host that holds a job, else the largest host, else live hosts of one model."""
    alone = [host for host in hosts if host.slots >= demand.num_slots]
    if alone:
        return [max(alone, key=lambda host: host.is_measured)]
    models = group_by_model(host for host in hosts if host.is_live)
    gangs = [gang for gang in models if demand.get_best_unit(host.slots for host in gang) is not None]
    return max(gangs, key=lambda gang: sum(host.slots for host in gang), default=[])


def build_gang_cluster(gang: Sequence[AvailableHost], spec: JobSpec) -> Cluster:
    """Return the cluster of hosts of one model, largest first.

    Without a host, and for a CPU host without facts and measurements, the cluster comes from a data sheet.
    """
    largest = Host.objects.filter(pk=gang[0].pk).first() if gang else None
    is_unknown = len(gang) == 1 and gang[0].device == "cpu" and not gang[0].is_measured
    if largest is None or (is_unknown and not largest.facts):
        return get_default_cluster(spec)
    return build_host_cluster(largest) if len(gang) == 1 else build_cluster_like(largest, len(gang))


def build_cluster_like(largest: Host, count: int) -> Cluster:
    """Return a cluster of hosts like the largest one. Their network is that of the data sheet."""
    name = f"{count} hosts like {largest.name}"[:100]
    return build_host_cluster(largest).model_copy(update={"name": name, "network": _get_data_sheet(largest).network})


def build_host_cluster(host: Host) -> Cluster:
    """Return the cluster of one host from its calibration or data sheet, corrected by its runs."""
    return apply_runs(build_calibrated_cluster(host) or _describe_host(host), load_measured_runs(host))


def build_calibrated_cluster(host: Host) -> Cluster | None:
    """Return the cluster that a calibration of this version measured, if any."""
    try:
        return build_cluster(host.name, HostProfile.model_validate(host.profile, strict=False))
    except ValidationError:
        return None


def _get_data_sheet(host: Host) -> Cluster:
    found = find_cluster(host.device_name, host.memory_bytes) if host.device == "cuda" else None
    return found or CLUSTERS[DEFAULT_CLUSTER[host.device]]


def _describe_host(host: Host) -> Cluster:
    """Return the data sheet with the slots and memory of a host. An unknown GPU gets the rates of the default GPU."""
    sheet, name = _get_data_sheet(host), host.device_name or host.name
    if host.device == "cpu":
        facts = host.facts or {}
        sheet = use_cores(sheet, facts.get("cores"), facts.get("bf16"))
    elif find_cluster(host.device_name, host.memory_bytes) is None:
        name = f"{name[:60]}{NO_DATA_SHEET}"
    accelerator = sheet.accelerator.model_copy(update={"name": name[:100], "memory_bytes": host.memory_bytes})
    return sheet.model_copy(update={"name": host.name, "accelerator": accelerator, "per_node": host.slots})


class HardwareOption(NamedTuple):
    """Hardware that pages offer to plan for. `device` is the device of a job there."""

    name: str
    words: str
    device: str


class OwnField(NamedTuple):
    """Field of an own accelerator on a page. `example` is the value for an H100."""

    name: str
    label: str
    example: str

    @property
    def is_number(self) -> bool:
        return self.name != "name"


OWN_FIELDS = (
    OwnField("memory_gb", "Memory (GB)", "80"),
    OwnField("bf16_tflops", "Dense bf16 peak (TFLOP/s)", "989"),
    OwnField("memory_gb_s", "Memory bandwidth (GB/s)", "3350"),
    OwnField("node_gb_s", "Link inside node (GB/s)", "450"),
    OwnField("network_gb_s", "Network per GPU (GB/s)", "50"),
    OwnField("gpus_per_node", "GPUs per node", "8"),
    OwnField("name", "Name", OWN_NAME),
)


def list_hardware() -> list[HardwareOption]:
    """Return the hardware to plan for, measured hosts first."""
    hosts = [
        HardwareOption(
            f"{HOST_PREFIX}{host.name}",
            f"{host.name}, {'calibrated' if host.profile else 'learned from runs'}",
            host.device,
        )
        for host in get_measured_hosts()
    ]
    return [*hosts, *(HardwareOption(name, cluster.name, cluster.device) for name, cluster in CLUSTERS.items())]
