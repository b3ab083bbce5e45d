"""Tasks of a planner process, which has no database.

`python -m jobs.planning.planner_tasks` reads a question per line and writes an answer per line.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from jobs.planning.schemas import FoundLayout, Plan, SearchResult, SpecProblem, Suggestion, Timeline
from planner.cost.estimate import Estimate, estimate, find_size_problems
from planner.cost.measured_steps import MEASURED_STEPS, add_measured_steps, parse_measured_steps
from planner.cost.pipeline_simulation import simulate
from planner.cost.timing import Timer
from planner.cost.traffic import build_traffic_matrix
from planner.explain import Explanation, explain
from planner.facts.kinds import KINDS
from planner.facts.spec import JobSpec
from planner.facts.spec_rules import can_trainer_run, find_problems, find_unsupported_fields
from planner.facts.validation import Problem, SpecError
from planner.hardware.cluster import Cluster
from planner.search.auto_layout import AutoSpec, Capacity, HostCapacity, HostGang, find_fastest_layout
from planner.search.layout_search import Constraints, FittingLayout, compute_margins, search
from planner.search.neighbors import Neighbor, find_allowed_neighbors, find_impossible_options, suggest_layouts
from planner.search.post_run_advice import Hindsight, RunMeasurement, find_faster_layouts

# Layouts of one search. The best of Llama 3 405B on 16,384 GPUs is among the first 1,000 (docs/notebook/2026-11.md).
MAX_SEARCH_LAYOUTS = 2_000
MAX_STAGES = 16  # of a timeline
MAX_MICRO_BATCHES = 32
NICENESS = 5  # pages have priority over plans


def plan_spec(spec: JobSpec, cluster: Cluster, options: dict[str, Any]) -> Plan:
    """Return the plan of a draft. Its estimate is null if the draft has problems or trains no model."""
    problems = find_problems(spec)
    # A layout with more ranks than any host has slots can be planned.
    blocking = [problem for problem in problems if problem.field != "layout"] or find_size_problems(spec)
    try:
        cluster = cluster if blocking else _add_steps(cluster, spec, options)
    except SpecError as error:
        blocking = error.problems
    plan: Plan = {
        "estimate": None,
        "problems": serialize_problems([*problems, *(problem for problem in blocking if problem not in problems)]),
        "not_runnable": serialize_problems(find_unsupported_fields(spec)),
        "choices": find_impossible_options(spec),
    }
    if blocking or not KINDS[spec.kind].trains:
        return plan
    return {
        **plan,
        "estimate": estimate(spec, cluster),
        "suggestions": [serialize_neighbor(near) for near in suggest_layouts(spec, cluster)],
        "timeline": build_timeline(spec, cluster),
        "matrix": build_traffic_matrix(spec),
    }


def _add_steps(cluster: Cluster, spec: JobSpec, options: dict[str, Any]) -> Cluster:
    """Return the cluster with the measured steps of a task. Raises SpecError."""
    return add_measured_steps(cluster, spec, parse_measured_steps(options.pop(MEASURED_STEPS, [])))


def estimate_spec(spec: JobSpec, cluster: Cluster, options: dict[str, Any]) -> Estimate:
    """Return the estimate without charts and suggest_layouts."""
    return estimate(spec, cluster)


def build_timeline(spec: JobSpec, cluster: Cluster) -> Timeline | None:
    """Return the pipeline schedule as cells, or None without pipeline parallelism.

    Large schedules are limited to the first stages and micro-batches, and `whole` is false.
    """
    layout = spec.layout
    if layout.pp == 1:
        return None
    num_stages = min(layout.pp, MAX_STAGES)
    num_micro_batches = min(spec.train.micro_batches, max(2 * num_stages, MAX_MICRO_BATCHES // num_stages * num_stages))
    if num_stages < layout.pp:  # interleaved schedules need a multiple of the number of stages
        num_micro_batches = num_micro_batches // num_stages * num_stages or num_micro_batches
    time, chunks = estimate(spec, cluster)["time"], layout.virtual_stages
    schedule = simulate(
        layout.model_copy(update={"pp": num_stages}),
        num_micro_batches,
        forward_s=time["forward_s"] / chunks,
        inputs_s=time["backward_input_s"] / chunks,
        weights_s=time["backward_weight_s"] / chunks,
        slowdowns=Timer(cluster).get_relative_stages(spec, num_stages),
    )
    return {
        "stages": num_stages,
        "micro_batches": num_micro_batches,
        "whole": num_stages == layout.pp and num_micro_batches == spec.train.micro_batches,
        "step_s": schedule.step_s,
        "bubble": schedule.bubble,
        "in_flight": [*schedule.in_flight],
        "cells": [*schedule.cells],
    }


def explain_spec(spec: JobSpec, cluster: Cluster, options: dict[str, Any]) -> list[Explanation]:
    """Return the terms of each figure for a rank of a stage.

    Raises:
        SpecError: The spec cannot be planned, or has no such stage.
    """
    if problems := _find_kind_problems(spec) or find_problems(spec) or find_size_problems(spec):
        raise SpecError(problems)
    stage, last = options["stage"], spec.layout.pp - 1
    if stage > last:
        raise SpecError([Problem("stage", f"`stage` is {stage}, but stages are numbered from 0 to {last}.")])
    return explain(spec, _add_steps(cluster, spec, options), stage=stage)


def search_spec(spec: JobSpec, cluster: Cluster, options: dict[str, Any]) -> SearchResult:
    """Return the fastest layouts on a number of ranks, and why similar layouts were not chosen.

    Raises:
        SpecError: A fixed field is invalid, or the spec trains no model.
    """
    if problems := _find_kind_problems(spec):
        raise SpecError(problems)
    cluster, limit = _add_steps(cluster, spec, options), options.pop("limit")
    constraints = Constraints(**options, max_layouts=MAX_SEARCH_LAYOUTS)
    result = search(spec, cluster, constraints, limit=limit)
    near = find_allowed_neighbors(result.best[0].spec, cluster, constraints) if result.best else []
    return {
        "best": serialize_layouts(result.best, cluster),
        "pareto": serialize_layouts(result.pareto, cluster),
        "neighbours": [serialize_neighbor(one) for one in near],
        "considered": result.considered,
        "total": result.total,
        "fitting": result.fitting,
        "refused": result.refused,
        "seconds": result.seconds,
        "complete": result.complete,
        "cluster": {"name": cluster.name, "memory_bytes": cluster.accelerator.memory_bytes, "basis": cluster.basis},
    }


def _find_kind_problems(spec: JobSpec) -> list[Problem]:
    if KINDS[spec.kind].trains:
        return []
    return [Problem("kind", f"`kind` is {spec.kind}, which has no estimate. Use `train` or `dry_run`.")]


def choose_layout(spec: JobSpec, cluster: Cluster, options: dict[str, Any]) -> dict[str, Any]:
    """Return the layout and micro-batches for the layout "auto", and why they were chosen.

    Raises:
        SpecError: No layout fits.
    """
    gangs = [HostGang(tuple(sizes), memory_bytes) for sizes, memory_bytes in options["gangs"]]
    rooms = Capacity([HostCapacity(*room) for room in options["rooms"]], gangs)
    auto, cluster = AutoSpec(**options["auto"]), _add_steps(cluster, spec, options)
    choice = find_fastest_layout(
        spec, cluster, auto, rooms, runnable=options["runnable"], max_layouts=MAX_SEARCH_LAYOUTS
    )
    chosen = choice.spec
    return {
        "layout": chosen.layout.model_dump(),
        "micro_batches": chosen.train.micro_batches,
        "told": choice.chosen,
    }


def advise(spec: JobSpec, cluster: Cluster, options: dict[str, Any]) -> Hindsight:
    """Return which single changes would have made a finished run faster."""
    return find_faster_layouts(spec, cluster, RunMeasurement(**options))


def serialize_layouts(found: Sequence[FittingLayout], cluster: Cluster) -> list[FoundLayout]:
    """Return the layouts of a search as JSON."""
    return [
        {
            "layout": one.spec.layout.model_dump(),
            "micro_batches": one.spec.train.micro_batches,
            "micro_batch_size": one.spec.micro_batch_size,
            "step_s": one.timing.step_s,
            "mfu": one.timing.mfu,
            "tokens_per_s": one.timing.tokens_per_s,
            "interval": intervals.time,
            "memory_bytes": one.memory_bytes,
            "memory_interval": intervals.memory,
            "runnable": can_trainer_run(one.spec),
        }
        for one, intervals in zip(found, compute_margins(found, cluster), strict=True)
    ]


def serialize_neighbor(near: Neighbor) -> Suggestion:
    """Return a layout that differs in one choice as JSON."""
    return {
        "change": near.change,
        "fits": near.fits,
        "reason": near.reason,
        "step_s": near.step_s,
        "memory_bytes": near.memory_bytes,
        "layout": near.spec.layout.model_dump(),
        "micro_batches": near.spec.train.micro_batches,
    }


def serialize_problems(problems: list[Problem]) -> list[SpecProblem]:
    return [{"field": problem.field, "message": problem.message} for problem in problems]


TASKS = {
    "plan": plan_spec,
    "estimate": estimate_spec,
    "explain": explain_spec,
    "search": search_spec,
    "choose": choose_layout,
    "advise": advise,
}


def answer_question(line: str) -> dict[str, Any]:
    """Return {"answer"}, {"problems"} of a SpecError, or {"failed"} with a traceback."""
    question = json.loads(line)
    try:
        spec = JobSpec.model_validate_json(question["spec"])
        cluster = Cluster.model_validate_json(question["cluster"])
        return {"answer": TASKS[question["task"]](spec, cluster, question["options"])}
    except SpecError as error:
        return {"problems": [[problem.field, problem.message] for problem in error.problems]}
    except Exception:
        return {"failed": traceback.format_exc()}


def main() -> None:
    os.nice(NICENESS)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer_question(line)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
