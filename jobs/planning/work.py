"""The planner's heavy answers, without a database: what a planner process runs (`jobs.planning.planners`).

`python -m jobs.planning.work` reads a question a line from its input and writes an answer a line.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from jobs.planning.shapes import FoundLayout, Plan, SearchResult, SpecProblem, Suggestion, Timeline
from planner.cost.estimate import Estimate, estimate, oversize
from planner.cost.pipeline_simulation import simulate
from planner.cost.timing import Timer
from planner.cost.traffic import traffic_matrix
from planner.explain import Explanation, explain
from planner.facts.kinds import KINDS
from planner.facts.spec import JobSpec
from planner.facts.spec_rules import find_problems, find_unsupported_fields
from planner.facts.validation import Problem, SpecError
from planner.hardware.cluster import Cluster
from planner.search.auto_layout import AutoSpec, Gang, Room, Rooms, choose
from planner.search.layout_search import Constraints, Found, Sure, search, sureness_of
from planner.search.neighbors import Neighbour, choices, neighbours_within, suggestions
from planner.search.post_run_advice import Hindsight, Measure, hindsight

SEARCH_SECONDS = 5.0
MOST_STAGES = 16
MOST_MICRO_BATCHES = 32
NICENESS = 5  # pages before plans, where both want the processor


def plan(spec: JobSpec, cluster: Cluster, asked: dict[str, Any]) -> Plan:
    """Everything about a draft that the page shows; `estimate` is null while it has problems, or trains nothing."""
    found = find_problems(spec)
    # More ranks than any host has slots can be costed all the same: that is what planning is for.
    costly = [p for p in found if p.field != "layout"] or oversize(spec)
    answer: Plan = {
        "estimate": None,
        "problems": told([*found, *(p for p in costly if p not in found)]),
        "not_runnable": told(find_unsupported_fields(spec)),
        "choices": choices(spec),
    }
    if costly or not KINDS[spec.kind].trains:
        return answer
    return {
        **answer,
        "estimate": estimate(spec, cluster),
        "suggestions": [neighbour(n) for n in suggestions(spec, cluster)],
        "timeline": timeline(spec, cluster),
        "matrix": traffic_matrix(spec),
    }


def estimated(spec: JobSpec, cluster: Cluster, asked: dict[str, Any]) -> Estimate:
    """Return the estimate alone, without charts and suggestions."""
    return estimate(spec, cluster)


def timeline(spec: JobSpec, cluster: Cluster) -> Timeline | None:
    """The pipeline schedule as cells, None without a pipe.

    Drawn for the first stages and micro-batches when there are many; `whole` says whether that is all of them. A stage
    of less, or without the head, takes less time.
    """
    layout = spec.layout
    if layout.pp == 1:
        return None
    pp = min(layout.pp, MOST_STAGES)
    m = min(spec.train.micro_batches, max(2 * pp, MOST_MICRO_BATCHES // pp * pp))
    if pp < layout.pp:
        m = m // pp * pp or m  # schedules that go round in turns of a pipe's length need whole ones
    timed = estimate(spec, cluster)["time"]
    v = layout.virtual_stages
    drawn = simulate(
        layout.model_copy(update={"pp": pp}),
        m,
        forward_s=timed["forward_s"] / v,
        inputs_s=timed["backward_input_s"] / v,
        weights_s=timed["backward_weight_s"] / v,
        longer=Timer(cluster).stages(spec, pp),
    )
    return {
        "stages": pp,
        "micro_batches": m,
        "whole": pp == layout.pp and m == spec.train.micro_batches,
        "step_s": drawn.step_s,
        "bubble": drawn.bubble,
        "in_flight": [*drawn.in_flight],
        "cells": [*drawn.cells],
    }


def explained(spec: JobSpec, cluster: Cluster, asked: dict[str, Any]) -> list[Explanation]:
    """Every figure's terms for a rank of a stage.

    Raises:
        SpecError: the draft cannot be planned, or has no such stage.
    """
    found = _of_no_training(spec) or find_problems(spec) or oversize(spec)
    if found:
        raise SpecError(found)
    if asked["stage"] >= spec.layout.pp:
        raise SpecError(
            [Problem("stage", f"`stage` is {asked['stage']}, but stages are numbered from 0 to {spec.layout.pp - 1}.")]
        )
    return explain(spec, cluster, stage=asked["stage"])


def searched(spec: JobSpec, cluster: Cluster, asked: dict[str, Any]) -> SearchResult:
    """Every layout on so many ranks, ranked; why the neighbours of the first were not taken.

    Raises:
        SpecError: a fixed field that cannot be, or a spec that trains nothing.
    """
    if found := _of_no_training(spec):
        raise SpecError(found)
    limit = asked.pop("limit")
    constraints = Constraints(**asked, max_seconds=SEARCH_SECONDS)
    result = search(spec, cluster, constraints, limit=limit)
    near = neighbours_within(result.best[0].spec, cluster, constraints) if result.best else []
    return {
        "best": layouts_found(result.best, cluster),
        "pareto": layouts_found(result.pareto, cluster),
        "neighbours": [neighbour(n) for n in near],
        "considered": result.considered,
        "fitting": result.fitting,
        "refused": result.refused,
        "seconds": result.seconds,
        "complete": result.complete,
        "cluster": {"name": cluster.name, "memory_bytes": cluster.accelerator.memory_bytes, "basis": cluster.basis},
    }


def _of_no_training(spec: JobSpec) -> list[Problem]:
    if KINDS[spec.kind].trains:
        return []
    return [Problem("kind", f"`kind` is {spec.kind}, which has no estimate. Use `train` or `dry_run`.")]


def chosen(spec: JobSpec, cluster: Cluster, asked: dict[str, Any]) -> dict[str, Any]:
    """The layout that takes the place of "auto", with its micro-batches, and what is told of it.

    Raises:
        SpecError: nothing fits.
    """
    gangs = [Gang(tuple(sizes), memory_bytes) for sizes, memory_bytes in asked["gangs"]]
    rooms = Rooms([Room(*room) for room in asked["rooms"]], gangs)
    choice = choose(
        spec, cluster, AutoSpec(**asked["auto"]), rooms, runnable=asked["runnable"], max_seconds=SEARCH_SECONDS
    )
    layout, m = choice.spec.layout.model_dump(), choice.spec.train.micro_batches
    return {"layout": layout, "micro_batches": m, "told": choice.told}


def advised(spec: JobSpec, cluster: Cluster, asked: dict[str, Any]) -> Hindsight:
    """What would have been faster than a run that ended on `cluster`."""
    return hindsight(spec, cluster, Measure(**asked))


def layouts_found(found: Sequence[Found], cluster: Cluster) -> list[FoundLayout]:
    """Lines of a search."""
    return [_layout_found(one, sure) for one, sure in zip(found, sureness_of(found, cluster), strict=True)]


def _layout_found(found: Found, sure: Sure) -> FoundLayout:
    spec, timing = found.spec, found.timing
    return {
        "layout": spec.layout.model_dump(),
        "micro_batches": spec.train.micro_batches,
        "micro_batch_size": spec.micro_batch_size,
        "step_s": timing.step_s,
        "mfu": timing.mfu,
        "tokens_per_s": timing.tokens_per_s,
        "interval": sure.time,
        "memory_bytes": found.memory_bytes,
        "memory_interval": sure.memory,
        "runnable": not find_unsupported_fields(spec),
    }


def neighbour(near: Neighbour) -> Suggestion:
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


def told(found: list[Problem]) -> list[SpecProblem]:
    return [{"field": p.field, "message": p.message} for p in found]


WORK = {
    "plan": plan,
    "estimated": estimated,
    "explained": explained,
    "searched": searched,
    "chosen": chosen,
    "advised": advised,
}


def answer(line: str) -> dict[str, Any]:
    """{"answer"}, {"problems"} of a SpecError, or {"failed"} with the traceback."""
    question = json.loads(line)
    try:
        spec = JobSpec.model_validate_json(question["spec"])
        cluster = Cluster.model_validate_json(question["cluster"])
        return {"answer": WORK[question["work"]](spec, cluster, question["asked"])}
    except SpecError as error:
        return {"problems": [[p.field, p.message] for p in error.problems]}
    except Exception:
        return {"failed": traceback.format_exc()}


def main() -> None:
    os.nice(NICENESS)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(line)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
