"""A layout chosen for a spec that asks for one, with the memory and slots of the hosts that are there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jobs.models import Host
from jobs.planning.hardware import OfModel, by_model, cluster_for, host_cluster, several
from jobs.planning.planners import ask
from jobs.planning.room import host_problems
from jobs.planning.there import hosts_there, labels_asked
from planner.facts.spec import JobSpec
from planner.facts.spec_rules import find_unsupported_fields
from planner.facts.validation import Problem, SpecError
from planner.hardware.cluster import Cluster
from planner.search.auto_layout import FIELD, AutoLayout, AutoSpec, Gang, Room, Rooms, asked_of, draft_of


def resolved(data: Any, cluster_name: object = None, *, to_run: bool = True) -> tuple[Any, AutoLayout | None]:
    """The spec with a layout of its own, and what was chosen and why; as it was, and None, where it names one.

    `cluster_name`: hardware to choose for where the spec names none. `to_run`: refuse what can be planned only.

    Raises:
        SpecError: nothing can be chosen.
        BusyError: as `jobs.planning.planners.ask`.
    """
    asked = asked_of(data)
    if asked is None:
        return data, None
    draft = draft_of(data)
    unable = find_unsupported_fields(draft)
    if to_run and unable:
        raise SpecError(unable)
    cluster, rooms = _where(draft, asked, asked.cluster or cluster_name)
    chosen = ask(
        "chosen",
        draft,
        cluster,
        {"auto": asked.model_dump(), "rooms": rooms.alone, "gangs": rooms.gangs, "runnable": not unable},
    )
    train = {**data.get("train", {}), "micro_batches": chosen["micro_batches"]}
    return {**data, "layout": chosen["layout"], "train": train}, chosen["told"]


def _where(draft: JobSpec, asked: AutoSpec, cluster_name: object) -> tuple[Cluster, Rooms]:
    """Hardware to time layouts on, and what ranks may be placed on there: hosts alone, and several together."""
    if cluster_name:
        cluster = cluster_for(cluster_name, draft)
        slots = max(cluster.per_node, asked.ranks or asked.max_ranks or 0)
        return cluster, Rooms([Room(slots, cluster.accelerator.memory_bytes)])
    if draft.resources.engine != "hosts":
        text = "`layout.auto` needs known hosts, but Slurm nodes are unknown. Set `layout.auto.cluster` or `layout`."
        raise SpecError([Problem(FIELD, text)])
    device, wanted = draft.resources.device, draft.resources.host
    hosts = Host.objects.accepting_jobs().filter(device=device).order_by("-slots", "name")
    if wanted is not None:
        hosts = hosts.filter(name=wanted)
    labels = labels_asked(draft.resources)
    there = [host for host in hosts if labels <= {*host.labels}]
    if not there:
        if unknown := host_problems(draft, hosts_there(draft)):
            raise SpecError(unknown)
        who = f"Host {wanted}" if wanted is not None else f"A {device.upper()} host"
        who += f" with the labels {', '.join(sorted(labels))}" if labels else ""
        text = f"{who} is not connected, so no layout can be chosen. Set `layout.auto.cluster` or `layout`."
        raise SpecError([Problem(FIELD, text)])
    rooms, gangs = rooms_of(there, draft.resources.max_hosts)
    largest = max(gangs, key=lambda gang: sum(host.slots for host in gang), default=[])
    return several(largest[0], len(largest)) if largest else host_cluster(there[0]), rooms


def rooms_of(hosts: Sequence[OfModel], max_hosts: int | None) -> tuple[Rooms, list[list[OfModel]]]:
    """What ranks may be placed on, and the hosts of each gang."""
    gangs = [gang for model in by_model(hosts) if len(gang := model[:max_hosts]) > 1]
    together = [Gang(tuple(h.slots for h in gang), min(h.memory_bytes for h in gang)) for gang in gangs]
    return Rooms([Room(host.slots, host.memory_bytes) for host in hosts], together), gangs
