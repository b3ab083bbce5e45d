"""Estimates, searches and explanations of a draft, for the job form, the Planner and REST."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jobs.planning.auto import resolved
from jobs.planning.fit import split_allow_unfit
from jobs.planning.hardware import HOST, cluster_for, host_cluster, known_hosts, own_cluster
from jobs.planning.planners import ask
from jobs.planning.queries import ExplainQuery, SearchQuery, checked
from jobs.planning.refusals import refusals
from jobs.planning.resumed import checkpoint_problems
from jobs.planning.shapes import Plan, Preset, SearchResult, Template
from jobs.planning.there import There, hosts_there
from jobs.planning.work import told
from planner.facts.kinds import of_any_world
from planner.facts.models.presets import PRESETS
from planner.facts.models.shapes import parameter_count
from planner.facts.precision import MIXES
from planner.facts.reading.parse import parse_fields
from planner.facts.spec import JobSpec, SpecError
from planner.hardware.cluster import Cluster
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
    return planned(data, cluster_name, user=user).plan


class Planned(NamedTuple):
    """The plan of a draft.

    Attributes:
        plan: The answer of `plan`.
        spec: The spec with its layout, or None if the draft cannot be read.
        there: The hosts of the spec.
        cluster: The hardware of the estimate, or None if the draft cannot be read.
        named: Whether the request or the draft named the hardware.
    """

    plan: Plan
    spec: JobSpec | None = None
    there: Sequence[There] = ()
    cluster: Cluster | None = None
    named: bool = False


def planned(data: object, cluster_name: object = None, *, user: Any) -> Planned:
    """Plan a draft as `plan` does, and return what the plan was made from.

    Raises:
        BusyError: as `plan`.
    """
    try:
        data, _ = split_allow_unfit(data)
        data, chosen = resolved(data, cluster_name, to_run=False)
        spec = parse_fields(data)
        there = hosts_there(spec)
        named = _named(cluster_name, chosen)
        cluster = cluster_for(named, spec) if named else own_cluster(spec, there)
    except SpecError as error:
        return Planned({"estimate": None, "problems": told(error.problems), "not_runnable": [], "choices": {}})
    found: Plan = ask("plan", spec, cluster, {})
    found["problems"] += told(refusals(user, spec, there))
    blocked = [*found["not_runnable"], *told(checkpoint_problems(user, spec))]
    answer: Plan = {**found, "not_runnable": blocked, "chosen": chosen}
    return Planned(answer, spec, there, cluster, bool(named))


def estimate_to_run(found: Planned) -> Mapping[str, Any] | None:
    """Return the estimate of a planned draft on the hardware that it would run on.

    Raises:
        BusyError: as `plan`.
    """
    if found.spec is None or found.plan["estimate"] is None or not found.named:
        return found.plan["estimate"]
    own = own_cluster(found.spec, found.there)
    if own == found.cluster:
        return found.plan["estimate"]
    estimate: Mapping[str, Any] = ask("estimated", found.spec, own, {})
    return estimate


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
