"""What the planner says of a draft: for the submit page, the what-if page and REST."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.models import Host
from jobs.planning.hardware import cluster_for, measured_cluster
from jobs.planning.queries import ExplainQuery, SearchQuery, checked
from planner.advice import Neighbour, neighbours, suggestions
from planner.choices import choices
from planner.cluster import Cluster
from planner.clusters import CLUSTERS
from planner.estimate import estimate
from planner.explain import explain
from planner.layout import problems
from planner.matrix import traffic_matrix
from planner.models import parameter_count
from planner.parse import oversize, parse_fields
from planner.precision import MIXES
from planner.presets import PRESETS
from planner.runnable import not_runnable
from planner.schedules import simulate
from planner.search import Constraints, Found, search
from planner.spec import JobSpec, Problem, SpecError
from planner.templates import TEMPLATES

SEARCH_SECONDS = 5.0
MOST_STAGES = 16
MOST_MICRO_BATCHES = 32


def plan(data: object, cluster_name: object = None) -> dict[str, Any]:
    """Everything about a draft that the page shows; `estimate` is null while the draft has problems."""
    try:
        spec = parse_fields(data)
        cluster = cluster_for(cluster_name, spec)
    except SpecError as error:
        return {"estimate": None, "problems": _told(error.problems), "not_runnable": [], "choices": {}}
    slots = Host.objects.largest_slots(spec.resources.device)
    found = problems(spec, slots=slots)
    # More ranks than any host has slots can be costed all the same: that is what planning is for.
    costly = [p for p in found if p.field != "layout"] or oversize(spec)
    answer = {
        "estimate": None,
        "problems": _told([*found, *(p for p in costly if p not in found)]),
        "not_runnable": _told(not_runnable(spec)),
        "choices": choices(spec),
    }
    if costly:
        return answer
    return {
        **answer,
        "estimate": estimate(spec, cluster),
        "suggestions": [neighbour(n) for n in suggestions(spec, cluster)],
        "timeline": timeline(spec, cluster),
        "matrix": traffic_matrix(spec),
    }


def timeline(spec: JobSpec, cluster: Cluster) -> dict[str, Any] | None:
    """The pipeline schedule as cells [rank, kind, micro-batch, chunk, start, end] in seconds, None without a pipe.

    Drawn for the first stages and micro-batches when there are many; `whole` says whether that is all of them.
    """
    layout = spec.layout
    if layout.pp == 1:
        return None
    pp = min(layout.pp, MOST_STAGES)
    m = min(spec.train.micro_batches, max(2 * pp, MOST_MICRO_BATCHES // pp * pp))
    timed = estimate(spec, cluster)["time"]
    v = layout.virtual_stages
    drawn = simulate(
        layout.model_copy(update={"pp": pp}),
        m,
        forward_s=timed["forward_s"] / v,
        inputs_s=timed["backward_input_s"] / v,
        weights_s=timed["backward_weight_s"] / v,
    )
    return {
        "stages": pp,
        "micro_batches": m,
        "whole": pp == layout.pp and m == spec.train.micro_batches,
        "step_s": drawn.step_s,
        "bubble": drawn.bubble,
        "in_flight": drawn.in_flight,
        "cells": [[c.rank, c.kind, c.micro_batch, c.chunk, c.start_s, c.end_s] for c in drawn.cells],
    }


def explained(data: object) -> list[Any]:
    """Every figure's terms for a rank of a stage.

    Raises:
        SpecError: the draft cannot be planned, or has no such stage.
    """
    query = checked(ExplainQuery, data)
    spec = parse_fields(query.spec)
    cluster = cluster_for(query.cluster, spec)
    found = problems(spec) or oversize(spec)
    if found:
        raise SpecError(found)
    if query.stage >= spec.layout.pp:
        raise SpecError([Problem("stage", f"must be a whole number from 0 to {spec.layout.pp - 1}")])
    return list(explain(spec, cluster, stage=query.stage))


def searched(data: object) -> dict[str, Any]:
    """Every layout on so many ranks, ranked; why the neighbours of the first were not taken.

    Raises:
        SpecError: a field that is missing, unknown or senseless.
    """
    query = checked(SearchQuery, data)
    spec = parse_fields(_seed(query.spec, query.fixed))
    cluster = cluster_for(query.cluster, spec)
    constraints = Constraints(
        world_size=query.ranks,
        fixed=query.fixed,
        max_micro_batch=query.max_micro_batch,
        max_memory_bytes=query.max_memory_bytes,
        runnable=query.runnable,
        max_seconds=SEARCH_SECONDS,
    )
    result = search(spec, cluster, constraints, limit=query.limit)
    return {
        "best": [layout_found(f) for f in result.best],
        "pareto": [layout_found(f) for f in result.pareto],
        "neighbours": [neighbour(n) for n in neighbours(result.best[0].spec, cluster)] if result.best else [],
        "considered": result.considered,
        "fitting": result.fitting,
        "refused": result.refused,
        "seconds": result.seconds,
        "complete": result.complete,
        "cluster": {"name": cluster.name, "memory_bytes": cluster.accelerator.memory_bytes, "basis": cluster.basis},
    }


def _seed(data: object, fixed: Mapping[str, Any]) -> object:
    """The spec to start from: its layout is what is searched, so only the fixed fields of it are checked."""
    if not isinstance(data, Mapping):
        return data
    return {**data, "layout": dict(fixed)}


def layout_found(found: Found) -> dict[str, Any]:
    """One line of a search."""
    spec, timing = found.spec, found.timing
    return {
        "layout": spec.layout.model_dump(),
        "micro_batches": spec.train.micro_batches,
        "micro_batch_size": spec.micro_batch_size,
        "step_s": timing.step_s,
        "mfu": timing.mfu,
        "tokens_per_s": timing.tokens_per_s,
        "memory_bytes": found.memory_bytes,
        "runnable": not not_runnable(spec),
    }


def neighbour(near: Neighbour) -> dict[str, Any]:
    """A layout one choice away, as JSON."""
    return {
        "change": near.change,
        "fits": near.fits,
        "reason": near.reason,
        "step_s": near.step_s,
        "memory_bytes": near.memory_bytes,
        "layout": near.spec.layout.model_dump(),
        "micro_batches": near.spec.train.micro_batches,
    }


def _told(found: list[Problem]) -> list[dict[str, str]]:
    return [{"field": p.field, "message": p.message} for p in found]


def presets() -> list[dict[str, Any]]:
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
    """Every named cluster and every measured host, with all that is assumed of it."""
    known = dict(CLUSTERS)
    for host in Host.objects.filter(profile__isnull=False):
        if measured := measured_cluster(host):
            known[f"host:{host.name}"] = measured
    return [{"id": name, **cluster.model_dump(exclude={"profile"})} for name, cluster in known.items()]


def templates() -> list[dict[str, Any]]:
    """Published layouts, each with a twin of CPU size."""
    return [{"id": name, **template._asdict()} for name, template in TEMPLATES.items()]


def precisions() -> list[tuple[str, str]]:
    """(name, what is held in which type)"""
    return [(name, mix.description) for name, mix in MIXES.items()]
