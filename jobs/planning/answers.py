"""What the planner says of a draft: for the submit page, the what-if page and REST."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.models import Host
from jobs.planning.hardware import cluster_for, measured_cluster
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


def explained(data: object, cluster_name: object, stage: object) -> list[Any]:
    """Every figure's terms for a rank of a stage.

    Raises:
        SpecError: the draft cannot be planned, or has no such stage.
    """
    spec = parse_fields(data)
    cluster = cluster_for(cluster_name, spec)
    found = problems(spec) or oversize(spec)
    if found:
        raise SpecError(found)
    if not isinstance(stage, int) or isinstance(stage, bool) or not 0 <= stage < spec.layout.pp:
        raise SpecError([Problem("stage", f"must be a whole number from 0 to {spec.layout.pp - 1}")])
    return list(explain(spec, cluster, stage=stage))


_SEARCH_FIELDS = ("spec", "ranks", "cluster", "fixed", "max_micro_batch", "max_memory_bytes", "runnable", "limit")


def searched(data: object) -> dict[str, Any]:
    """Every layout on so many ranks, ranked; why the neighbours of the first were not taken.

    Raises:
        SpecError: a field that is missing, unknown or senseless.
    """
    if not isinstance(data, Mapping):
        raise SpecError([Problem("request", "must be an object")])
    found = [Problem(str(name)[:60], "is not a known field") for name in data if name not in _SEARCH_FIELDS]
    found += [Problem(name, "is required") for name in ("spec", "ranks") if name not in data]
    numbers = {"ranks": (1, 65536), "max_micro_batch": (1, 1024), "max_memory_bytes": (1, 2**60), "limit": (1, 100)}
    for name, (least, most) in numbers.items():
        value = data.get(name, least)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            found.append(Problem(name, f"must be a whole number from {least} to {most}"))
    if not isinstance(data.get("fixed", {}), Mapping):
        found.append(Problem("fixed", "must be an object of layout fields"))
    if not isinstance(data.get("cluster", ""), str):
        found.append(Problem("cluster", "must be text"))
    if not isinstance(data.get("runnable", False), bool):
        found.append(Problem("runnable", "must be true or false"))
    if found:
        raise SpecError(found)
    fixed = dict(data.get("fixed", {}))
    spec = parse_fields(_seed(data["spec"], fixed))
    cluster = cluster_for(data.get("cluster"), spec)
    constraints = Constraints(
        world_size=data["ranks"],
        fixed=fixed,
        max_micro_batch=data.get("max_micro_batch", 16),
        max_memory_bytes=data.get("max_memory_bytes"),
        runnable=data.get("runnable", False),
        max_seconds=SEARCH_SECONDS,
    )
    result = search(spec, cluster, constraints, limit=data.get("limit", 20))
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
