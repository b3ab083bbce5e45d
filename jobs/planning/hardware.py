"""What can be planned for: named hardware, and the hosts that a calibration measured."""

from __future__ import annotations

from pydantic import ValidationError

from jobs.models import Host
from jobs.text import storable
from planner.cost.estimate import default_cluster
from planner.facts.kinds import num_slots
from planner.facts.spec import JobSpec, Problem, SpecError
from planner.hardware.calibration import cluster_of
from planner.hardware.cluster import Cluster
from planner.hardware.clusters import CLUSTERS
from planner.hardware.profile import HostProfile

HOST = "host:"


def cluster_for(name: object, spec: JobSpec) -> Cluster:
    """A cluster by name, `host:NAME` for a measured host; without a name what the job would run on.

    Raises:
        SpecError: there is no such hardware.
    """
    if name is None or name == "":
        return _own(spec) or default_cluster(spec)
    if not isinstance(name, str) or not storable(name):
        raise SpecError([Problem("cluster", "must be text")])
    if name.startswith(HOST):
        host = Host.objects.filter(name=name.removeprefix(HOST), profile__isnull=False).first()
        measured = host and measured_cluster(host)
        if measured:
            return measured
        raise SpecError([Problem("cluster", f"no calibration of a host {name.removeprefix(HOST)[:60]!r} is known")])
    if name not in CLUSTERS:
        raise SpecError([Problem("cluster", f"there is no cluster {name[:60]!r}; there are {', '.join(CLUSTERS)}")])
    return CLUSTERS[name]


def measured_cluster(host: Host) -> Cluster | None:
    """The host as its calibration measured it; None for a profile of another version."""
    try:
        return cluster_of(host.name, HostProfile.model_validate(host.profile, strict=False))
    except ValidationError:
        return None


def hardware() -> list[tuple[str, str]]:
    """(name, words) of everything a page offers to plan for, measured hosts first."""
    measured = Host.objects.filter(profile__isnull=False).order_by("name")
    hosts = [(f"{HOST}{host.name}", f"{host.name}, calibrated") for host in measured]
    return [*hosts, *((name, cluster.name) for name, cluster in CLUSTERS.items())]


def _own(spec: JobSpec) -> Cluster | None:
    """The measured host the job would most likely run on: the one it names, else the largest of its device."""
    hosts = Host.objects.filter(device=spec.resources.device, profile__isnull=False).order_by("-slots", "name")
    if spec.resources.host is not None:
        hosts = hosts.filter(name=spec.resources.host)
    host = hosts.first()
    return measured_cluster(host) if host and host.slots >= num_slots(spec) else None
