"""What the planner says of a draft: for the submit page, the what-if page and REST."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.planning.auto import resolved
from jobs.planning.hardware import HOST, cluster_for, host_cluster, known_hosts, own_cluster
from jobs.planning.planners import ask
from jobs.planning.queries import ExplainQuery, SearchQuery, checked
from jobs.planning.refusals import refusals
from jobs.planning.resumed import checkpoint_problems
from jobs.planning.shapes import Plan, Preset, SearchResult, Template
from jobs.planning.there import hosts_there
from jobs.planning.work import told
from planner.facts.kinds import of_any_world
from planner.facts.models.presets import PRESETS
from planner.facts.models.shapes import parameter_count
from planner.facts.precision import MIXES
from planner.facts.reading.parse import parse_fields
from planner.facts.spec import SpecError
from planner.hardware.clusters import CLUSTERS
from planner.search.auto import Chosen
from planner.teaching.explain import Explanation
from planner.teaching.templates import TEMPLATES


def plan(data: object, cluster_name: object = None, *, user: Any) -> Plan:
    """Everything about a draft that the page shows; `estimate` is null while the draft has problems, or trains nothing.

    `chosen` is what took the place of a layout "auto", with its reasons; null where the draft names a layout.
    `user`: who asks, and so whose checkpoints, projects and jobs there are.

    Raises:
        BusyError: too much is planned at once, or this takes too long.
    """
    try:
        data, chosen = resolved(data, cluster_name, to_run=False)
        spec = parse_fields(data)
        there = hosts_there(spec)
        named = _named(cluster_name, chosen)
        cluster = cluster_for(named, spec) if named else own_cluster(spec, there)
    except SpecError as error:
        return {"estimate": None, "problems": told(error.problems), "not_runnable": [], "choices": {}}
    found: Plan = ask("plan", spec, cluster, {})
    found["problems"] += told(refusals(user, spec, there))
    blocked = [*found["not_runnable"], *told(checkpoint_problems(user, spec))]
    return {**found, "not_runnable": blocked, "chosen": chosen}


def explained(data: object) -> list[Explanation]:
    """Every figure's terms for a rank of a stage.

    Raises:
        SpecError: the draft cannot be planned, or has no such stage.
        BusyError: as `plan`.
    """
    query = checked(ExplainQuery, data)
    data, chosen = resolved(query.spec, query.cluster, to_run=False)
    spec = parse_fields(data)
    cluster = cluster_for(_named(query.cluster, chosen), spec)
    found: list[Explanation] = ask("explained", spec, cluster, {"stage": query.stage})
    return found


def _named(cluster_name: object, chosen: Chosen | None) -> object:
    """The hardware that is asked for, or that the layout was chosen for."""
    return cluster_name or (chosen and chosen["asked"].get("cluster"))


def searched(data: object) -> SearchResult:
    """Every layout on so many ranks, ranked; why the neighbours of the first were not taken.

    Raises:
        SpecError: a field that is missing, unknown or senseless.
        BusyError: as `plan`.
    """
    query = checked(SearchQuery, data)
    spec = of_any_world(parse_fields(_seed(query.spec, query.fixed)))
    asked = {
        "world_size": query.ranks,
        "fixed": query.fixed,
        "max_micro_batch": query.max_micro_batch,
        "max_memory_bytes": query.max_memory_bytes,
        "runnable": query.runnable,
        "limit": query.limit,
    }
    found: SearchResult = ask("searched", spec, cluster_for(query.cluster, spec), asked)
    return found


def _seed(data: object, fixed: Mapping[str, Any]) -> object:
    """The spec to start from: its layout is what is searched, so only the fixed fields of it are checked."""
    if not isinstance(data, Mapping):
        return data
    return {**data, "layout": dict(fixed)}


def presets() -> list[Preset]:
    """Every preset with its exact parameter count."""
    return [
        {
            "name": name,
            "description": preset.description,
            "parameters": parameter_count(preset.model),
            "model": preset.model.model_dump(),
        }
        for name, preset in PRESETS.items()
    ]


def clusters() -> list[dict[str, Any]]:
    """Every named cluster and every known host, with all that is assumed of it."""
    known = {**CLUSTERS, **{f"{HOST}{host.name}": host_cluster(host) for host in known_hosts()}}
    return [{"id": name, **cluster.model_dump(exclude={"profile", "runs"})} for name, cluster in known.items()]


def templates() -> list[Template]:
    """Published layouts, each with a twin of CPU size."""
    return [
        {
            "id": name,
            "title": template.title,
            "source": template.source,
            "cluster": template.cluster,
            "spec": template.spec,
            "twin": template.twin,
        }
        for name, template in TEMPLATES.items()
    ]


def precisions() -> list[tuple[str, str]]:
    """(name, what is held in which type)"""
    return [(name, mix.description) for name, mix in MIXES.items()]
