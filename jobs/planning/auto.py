"""A layout chosen for a spec that asks for one, with the memory and slots of the hosts that are there."""

from __future__ import annotations

from typing import Any

from jobs.models import Host
from jobs.planning.hardware import cluster_for, host_cluster
from jobs.planning.planners import ask
from planner.facts.runnable import not_runnable
from planner.facts.spec import JobSpec, Problem, SpecError
from planner.hardware.cluster import Cluster
from planner.search.auto import FIELD, AutoSpec, Chosen, Room, asked_of, draft_of


def resolved(data: Any, cluster_name: object = None, *, to_run: bool = True) -> tuple[Any, Chosen | None]:
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
    unable = not_runnable(draft)
    if to_run and unable:
        raise SpecError(unable)
    cluster, rooms = _where(draft, asked, asked.cluster or cluster_name)
    chosen = ask(
        "chosen",
        draft,
        cluster,
        {"auto": asked.model_dump(), "rooms": [list(room) for room in rooms], "runnable": not unable},
    )
    train = {**data.get("train", {}), "micro_batches": chosen["micro_batches"]}
    return {**data, "layout": chosen["layout"], "train": train}, chosen["told"]


def _where(draft: JobSpec, asked: AutoSpec, cluster_name: object) -> tuple[Cluster, list[Room]]:
    """Hardware to time layouts on, and what ranks may be placed on there."""
    if cluster_name:
        cluster = cluster_for(cluster_name, draft)
        slots = max(cluster.per_node, asked.ranks or asked.max_ranks or 0)
        return cluster, [Room(slots, cluster.accelerator.memory_bytes)]
    if draft.resources.engine != "hosts":
        text = f"what machines {draft.resources.engine} has is not known here; name a cluster, or a layout"
        raise SpecError([Problem(FIELD, text)])
    device, wanted = draft.resources.device, draft.resources.host
    hosts = Host.objects.live(device).filter(drained=False).order_by("-slots", "name")
    if wanted is not None:
        hosts = hosts.filter(name=wanted)
    there = list(hosts)
    if not there:
        who = f"the host {wanted!r}" if wanted is not None else f"a host with {device} slots"
        text = f"{who} is not connected, so there is nothing to lay out for; name a cluster, or a layout"
        raise SpecError([Problem(FIELD, text)])
    return host_cluster(there[0]), [Room(host.slots, host.memory_bytes) for host in there]
