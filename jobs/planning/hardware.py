"""What can be planned for: named hardware, and the hosts that a calibration measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from django.db.models import QuerySet
from pydantic import ValidationError

from jobs.core.text import is_storable
from jobs.models import Host
from jobs.planning.learned import runs_of
from jobs.planning.there import There, hosts_there, labels_asked, was_measured
from planner.cost.estimate import default_cluster
from planner.cost.learning import learned
from planner.facts.kinds import SlotDemand, compute_slot_demand
from planner.facts.spec import JobSpec
from planner.facts.validation import Problem, SpecError
from planner.hardware.calibration import build_cluster
from planner.hardware.catalog import CLUSTERS, DEFAULT_CLUSTER, described, on_cores
from planner.hardware.cluster import Cluster
from planner.hardware.profile import HostProfile

HOST = "host:"
OfModel = TypeVar("OfModel", Host, There)


def cluster_for(name: object, spec: JobSpec) -> Cluster:
    """A cluster by name, `host:NAME` for a host that was measured or ran something; without a name what the job would
    run on.

    Raises:
        SpecError: there is no such hardware.
    """
    if name is None or name == "":
        return own_cluster(spec, hosts_there(spec))
    if not isinstance(name, str) or not is_storable(name):
        raise SpecError([Problem("cluster", "`cluster` is not a text. Use a cluster name from /clusters.")])
    if name.startswith(HOST):
        host = known_hosts().filter(name=name.removeprefix(HOST)).first()
        if host is None:
            text = (
                f"`cluster` is {name[:60]!r}, but this host has no calibration and no runs. Calibrate the host first."
            )
            raise SpecError([Problem("cluster", text)])
        return host_cluster(host)
    if name not in CLUSTERS:
        raise SpecError(
            [
                Problem(
                    "cluster",
                    f"`cluster` is {name[:60]!r}, which is an unknown cluster. Use one of {', '.join(CLUSTERS)}.",
                )
            ]
        )
    return CLUSTERS[name]


def known_hosts() -> QuerySet[Host]:
    """Hosts that a calibration measured, or on which something ran that was worth keeping."""
    return Host.objects.present().filter(was_measured()).order_by("name")


def host_cluster(host: Host) -> Cluster:
    """The host as its calibration measured it, else as its data sheet has it; corrected by what ran there."""
    return learned(measured_cluster(host) or _described(host), runs_of(host))


def several(largest: Host, count: int) -> Cluster:
    """So many hosts of one model: as the largest is, and between them the network of a data sheet, as nobody measured
    it."""
    sheet = _sheet(largest)
    name = f"{count} hosts like {largest.name}"
    return host_cluster(largest).model_copy(update={"name": name[:100], "network": sheet.network})


def by_model(hosts: Iterable[OfModel]) -> list[list[OfModel]]:
    """Hosts that one run may be spread over: those of one model, the largest first."""
    models: dict[str, list[OfModel]] = {}
    for host in sorted(hosts, key=lambda host: (-host.slots, host.name)):
        models.setdefault(host.device_name, []).append(host)
    return list(models.values())


def measured_cluster(host: Host) -> Cluster | None:
    """The host as its calibration measured it; None without one, and for a profile of another version."""
    try:
        return build_cluster(host.name, HostProfile.model_validate(host.profile, strict=False))
    except ValidationError:
        return None


class Offered(NamedTuple):
    """What a page offers to plan for: by which name, in words, and what a job there runs on."""

    name: str
    words: str
    device: str


def hardware() -> list[Offered]:
    """Everything that can be planned for, known hosts first."""
    hosts = [
        Offered(
            f"{HOST}{host.name}", f"{host.name}, {'calibrated' if host.profile else 'learned from runs'}", host.device
        )
        for host in known_hosts()
    ]
    return [*hosts, *(Offered(name, cluster.name, cluster.device) for name, cluster in CLUSTERS.items())]


def _sheet(host: Host) -> Cluster:
    found = described(host.device_name, host.memory_bytes) if host.device == "cuda" else None
    return found or CLUSTERS[DEFAULT_CLUSTER[host.device]]


def _described(host: Host) -> Cluster:
    """The cluster of the host's accelerators, with its own slots and memory; of a GPU without a data sheet the usual
    one's rates, told as no others of it."""
    sheet, name = _sheet(host), host.device_name or host.name
    if host.device == "cpu":
        facts = host.facts or {}
        sheet = on_cores(sheet, facts.get("cores"), facts.get("bf16"))
    if host.device == "cuda" and described(host.device_name, host.memory_bytes) is None:
        name = f"{name[:60]} (no data sheet)"
    own = {"name": name[:100], "memory_bytes": host.memory_bytes}
    accelerator = sheet.accelerator.model_copy(update=own)
    return sheet.model_copy(update={"name": host.name, "accelerator": accelerator, "per_node": host.slots})


def own_cluster(spec: JobSpec, there: Sequence[There]) -> Cluster:
    """What the job would most likely run on, of hosts that it may run on: those that take jobs now before others that
    are there, and these before silent ones; of a CPU that nobody measured and that told nothing of itself, and where
    there is no room, the data sheet's. Of another engine's machines nothing was measured.

    `there`: as `hosts_there` has them.
    """
    asked, labels = spec.resources, labels_asked(spec.resources)
    able = [
        host
        for host in there
        if host.device == asked.device and asked.host in (None, host.name) and labels <= host.labels
    ]
    for hosts in ([host for host in able if host.takes], [host for host in able if host.live], able):
        if gang := _holding(hosts, compute_slot_demand(spec)):
            return gang_cluster(gang, spec)
    return default_cluster(spec)


def _holding(hosts: Sequence[There], asked: SlotDemand) -> Sequence[There]:
    """The largest host that was measured, else the largest; where the job needs several, those of one model that are
    there now. None without room."""
    alone = [host for host in hosts if host.slots >= asked.num_slots]
    if alone:
        return [max(alone, key=lambda host: host.known)]
    live = by_model(host for host in hosts if host.live)
    holding = [gang for gang in live if asked.get_best_unit(host.slots for host in gang) is not None]
    return max(holding, key=lambda gang: sum(host.slots for host in gang), default=[])


def gang_cluster(gang: Sequence[There], spec: JobSpec) -> Cluster:
    """So many hosts of one model, the largest first. Of no hosts, of one that went meanwhile, and of a CPU of which
    nothing is known, the data sheet's."""
    largest = Host.objects.filter(pk=gang[0].pk).first() if gang else None
    unknown = len(gang) == 1 and gang[0].device == "cpu" and not gang[0].known
    if largest is None or (unknown and not largest.facts):
        return default_cluster(spec)
    return host_cluster(largest) if len(gang) == 1 else several(largest, len(gang))
