"""Estimates, searches and explanations of a draft, for the job form, the Planner and REST."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jobs.planning.auto import resolved
from jobs.planning.fit import split_allow_unfit
from jobs.planning.hardware import HOST, cluster_for, host_cluster, known_hosts, own_cluster
from jobs.planning.planners import ask
from jobs.planning.queries import ExplainRequest, SearchRequest, checked
from jobs.planning.refusals import refusals
from jobs.planning.resumed import checkpoint_problems
from jobs.planning.shapes import Plan, Preset, SearchResult, Template
from jobs.planning.there import There, hosts_there
from jobs.planning.work import told
from planner.explain import Explanation
from planner.facts.kinds import reset_dry_ranks
from planner.facts.model_shapes import count_parameters
from planner.facts.parse_spec import parse_fields
from planner.facts.precision import MIXED_PRECISIONS
from planner.facts.presets import PRESETS, TEMPLATES
from planner.facts.spec import JobSpec
from planner.facts.validation import SpecError
from planner.hardware.catalog import CLUSTERS
from planner.hardware.cluster import Cluster
from planner.search.auto_layout import AutoLayout


def plan(data: object, cluster_name: object = None, *, user: Any) -> Plan:
    """Plan a draft. `estimate` is null while the draft has problems, or if its kind trains no model.

    `chosen` has the automatic layout and its reasons, or null if the draft names a layout.

    Args:
        user: The user, whose checkpoints, projects and jobs count.

    Raises:
        BusyError: The planner is busy, or the plan takes too long.
    """
    return planned(data, cluster_name, user=user).plan


class Planned(NamedTuple):
    """The plan of a draft, and what it was made from. `spec` and `cluster` are None if the draft cannot be read."""

    plan: Plan
    spec: JobSpec | None = None
    there: Sequence[There] = ()
    cluster: Cluster | None = None
    named: bool = False  # whether the request or the draft names the cluster


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
    """Return every term of each figure for a rank of a stage.

    Raises:
        SpecError: the draft cannot be planned, or has no such stage.
        BusyError: as `plan`.
    """
    query = checked(ExplainRequest, data)
    data, chosen = resolved(query.spec, query.cluster, to_run=False)
    spec = parse_fields(data)
    cluster = cluster_for(_named(query.cluster, chosen), spec)
    found: list[Explanation] = ask("explained", spec, cluster, {"stage": query.stage})
    return found


def _named(cluster_name: object, chosen: AutoLayout | None) -> object:
    """Return the requested hardware, or the hardware that the layout was chosen for."""
    return cluster_name or (chosen and chosen["asked"].get("cluster"))


def searched(data: object) -> SearchResult:
    """Search the layouts on a number of ranks.

    Raises:
        SpecError: A field is missing, unknown or invalid.
        BusyError: as `plan`.
    """
    query = checked(SearchRequest, data)
    spec = reset_dry_ranks(parse_fields(_seed(query.spec, query.fixed)))
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
    """Return the spec to start from. Its layout has only the fixed fields."""
    if not isinstance(data, Mapping):
        return data
    return {**data, "layout": dict(fixed)}


def presets() -> list[Preset]:
    """Return every preset with its exact parameter count."""
    return [
        {
            "name": name,
            "description": preset.description,
            "parameters": count_parameters(preset.model),
            "model": preset.model.model_dump(),
        }
        for name, preset in PRESETS.items()
    ]


def clusters() -> list[dict[str, Any]]:
    """Return every named cluster and every known host with their properties."""
    known = {**CLUSTERS, **{f"{HOST}{host.name}": host_cluster(host) for host in known_hosts()}}
    return [{"id": name, **cluster.model_dump(exclude={"profile", "runs"})} for name, cluster in known.items()]


def templates() -> list[Template]:
    """Return the published layouts, each with a small copy for a CPU."""
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
    """Return the name and description of each precision."""
    return [(name, mix.description) for name, mix in MIXED_PRECISIONS.items()]
