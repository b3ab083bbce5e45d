"""The page Compare: specs, plans and measurements of two to six runs, relative to a baseline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_GET

from contracts.telemetry.items import TIMED_STEPS
from jobs.core.access import get_visible_jobs
from jobs.core.kinds import format_layout, get_kind
from jobs.core.text import is_storable
from jobs.models import Attempt, Job
from jobs.pages.jobs.speed_ranking import (
    RunSpeed,
    compute_speedup,
    compute_tokens_per_s,
    measure_runs,
    rank_speeds,
    scale_parts,
)
from jobs.runs.baselines import sum_traffic
from planner.cost.learning import MIN_TENSOR_BYTES
from planner.facts.kinds import drop_unused_fields

MIN_RUNS, MAX_RUNS = 2, 6
LETTERS = "ABCDEF"
IGNORED_FIELDS = ("name",)  # every job has its own


class Figure(NamedTuple):
    """A row of the table, with a planned and a measured value per run."""

    title: str
    unit: str  # selects the number format
    planned: list[float | None]
    measured: list[float | None]
    comparison: str = "share"  # how it is compared with the baseline: "share", "speed", or "" for none


@require_GET
def compare(request: HttpRequest) -> HttpResponse:
    """Show `?jobs=a,b,..&baseline=a`. Unknown jobs and jobs of other people give the same message."""
    ids = _parse_ids(request.GET.getlist("jobs"))
    found = get_visible_jobs(request.user).in_bulk([job for job in ids if is_storable(job)])
    jobs = [found[job] for job in ids if job in found][:MAX_RUNS]
    baseline = next((job for job in jobs if job.id == request.GET.get("baseline")), jobs[0] if jobs else None)
    exits, diagnoses = _read_attempts(jobs)
    context: dict[str, Any] = {
        "jobs": [
            {
                "job": job,
                "letter": LETTERS[place],
                "kind": get_kind(job.spec).title,
                "subject": get_kind(job.spec).subject(job.spec),
                "layout": format_layout(job.spec),
                "is_baseline": job == baseline,
            }
            for place, job in enumerate(jobs)
        ],
        "enough": len(jobs) >= MIN_RUNS,
        "planned": any(job.estimate for job in jobs),
        "missing": [job for job in ids if job not in found],
        "cut": len([job for job in ids if job in found]) > MAX_RUNS,
        "least": MIN_RUNS,
        "most": MAX_RUNS,
    }
    if context["enough"]:
        at = next(place for place, job in enumerate(jobs) if job == baseline)
        differ, same = compare_specs([job.spec for job in jobs])
        runs = measure_runs(jobs, exits, diagnoses)
        context |= {
            "answer": rank_speeds(runs, at),
            "not_measured": [job.name for job, run in zip(jobs, runs, strict=True) if run is None],
            "differ": differ,
            "same": same,
            "figures": [_format_figure(figure, at, runs) for figure in list_figures(jobs, exits, runs)],
            "axes": [_format_figure(figure, at, runs) for figure in list_axis_figures(jobs, exits)],
            "data": {
                "url": f"{reverse('api-compare')}?jobs={','.join(job.id for job in jobs)}",
                "jobs": [_format_chart(job, exits.get(job.id, {}), diagnoses.get(job.id, {})) for job in jobs],
            },
        }
    return render(request, "compare/index.html", context)


def _parse_ids(lists: list[str]) -> list[str]:
    """Return distinct ids in order, from comma-separated lists or several parameters."""
    ids = [job.strip() for several in lists for job in several.split(",")]
    return list(dict.fromkeys(job for job in ids if job))[: 2 * MAX_RUNS]


def _read_attempts(jobs: list[Job]) -> tuple[dict[str, Mapping[str, Any]], dict[str, Mapping[str, Any]]]:
    """Return the summary of the current attempt of each job, and the parts of a step in its diagnosis."""
    current = {(job.id, job.attempt) for job in jobs}
    rows = Attempt.objects.filter(job__in=jobs).values_list("job_id", "number", "exit", "diagnosis")
    exits: dict[str, Mapping[str, Any]] = {}
    steps: dict[str, Mapping[str, Any]] = {}
    for job, number, report, diagnosis in rows:
        if (job, number) in current:
            exits[job] = (report or {}).get("summary") or {}
            steps[job] = {side: (diagnosis or {}).get(side) for side in ("planned", "measured")}
    return exits, steps


def _format_chart(job: Job, summary: Mapping[str, Any], diagnosis: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of a job for the charts. The loss of the exit report is used if no history is stored."""
    points = summary.get("losses") or []
    curve = {name: [point[name] for point in points] for name in ("step", "loss")}
    curve["elapsed_s"] = [point["time"] - points[0]["time"] for point in points]
    return {
        "id": job.id,
        "name": job.name,
        "attempt": job.attempt,
        "curve": curve,
        "step_s": (summary.get("measured") or {}).get("step_s"),
        "estimate": {"time": job.estimate.get("time")},
        "diagnosis": {**diagnosis, "measured": scale_parts(summary, diagnosis)},
    }


def compare_specs(specs: list[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the fields that differ and the fields that are equal, with dotted names and values."""
    flat = [dict(_flatten(drop_unused_fields(spec))) for spec in specs]
    names = [name for name in dict.fromkeys(name for one in flat for name in one) if name not in IGNORED_FIELDS]
    differ: list[dict[str, Any]] = []
    same: list[dict[str, Any]] = []
    for name in names:
        values = [one.get(name, "") for one in flat]
        (same if all(value == values[0] for value in values) else differ).append({"name": name, "values": values})
    return differ, same


def _flatten(value: Any, path: str = "") -> list[tuple[str, str]]:
    """Return all leaves with their dotted names. A list is one leaf."""
    if isinstance(value, Mapping) and value:
        return [leaf for name, inner in value.items() for leaf in _flatten(inner, f"{path}.{name}" if path else name)]
    if isinstance(value, bool):
        return [(path, "yes" if value else "no")]
    if isinstance(value, list):
        return [(path, ", ".join(map(str, value)) or "none")]
    return [(path, "\N{EN DASH}" if value in (None, "") else str(value))]


def list_figures(jobs: list[Job], exits: Mapping[str, Mapping[str, Any]], runs: list[RunSpeed | None]) -> list[Figure]:
    """Return the rows for the whole run. All rows about speed use the step time of `runs`."""
    summaries = [exits.get(job.id, {}) for job in jobs]
    plans = [job.estimate for job in jobs]
    nothing: list[float | None] = [None] * len(jobs)
    batches = {run.tokens for run in runs if run is not None}
    rows = [
        Figure("ranks", "count", nothing, [float(job.world_size) for job in jobs], ""),
        Figure(
            "samples per second of the last steps",
            "count",
            nothing,
            [one.get("samples_per_s") for one in summaries],
            "share",
        ),
        Figure("steps done", "count", nothing, [summary.get("steps") for summary in summaries], ""),
        Figure(
            f"median step time of the last {TIMED_STEPS} steps (or fewer)",
            "seconds",
            [(plan.get("time") or {}).get("step_s") for plan in plans],
            [run and run.step_s for run in runs],
            "speed" if len(batches) == 1 else "",
        ),
        Figure(
            "tokens per second at the median step time",
            "count",
            [(plan.get("time") or {}).get("tokens_per_s") for plan in plans],
            [compute_tokens_per_s(run) for run in runs],
            "speed",
        ),
        _compare_losses("loss", "losses", summaries),
        _compare_losses("validation loss", "eval_losses", summaries),
        Figure(
            "peak memory of the rank with the highest peak",
            "bytes",
            [_estimate_tensors(job.estimate, job.device) for job in jobs],
            [_get_peak(summary, job.world_size) for summary, job in zip(summaries, jobs, strict=True)],
        ),
    ]
    return [row for row in rows if any(value is not None for value in (*row.planned, *row.measured))]


def list_axis_figures(jobs: list[Job], exits: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    """Return payload bytes per step of all ranks, by axis. Values per step compare runs of different lengths."""
    sums = [_sum_by_axis(exits.get(job.id, {}), job.world_size) for job in jobs]
    axes = list(dict.fromkeys(axis for one in sums for axis in one))
    return [
        Figure(
            f"{axis} payload bytes per step, sum of all ranks",
            "traffic",
            [one[axis][0] if axis in one else None for one in sums],
            [one[axis][1] if axis in one else None for one in sums],
        )
        for axis in axes
    ]


def _get_peak(summary: Mapping[str, Any], ranks: int) -> int | None:
    """Return the highest peak, or None if a rank is missing, because it may be the fullest."""
    peaks = summary.get("peak_bytes") or {}
    return max(peaks.values(), default=None) if len(peaks) >= ranks else None


def _sum_by_axis(summary: Mapping[str, Any], ranks: int) -> Mapping[str, tuple[float | None, float]]:
    """Return predicted and measured bytes per step by axis, or nothing if a rank is missing.

    A script has no prediction.
    """
    steps = summary.get("ran_steps", summary.get("steps", 0))
    verdicts, cells = summary.get("verdict") or {}, summary.get("cells") or {}
    if steps and not verdicts and len(cells) >= ranks and not summary.get("cells_left_out"):
        measured_bytes = defaultdict[str, float](float)
        for row in sum_traffic(cells, steps):
            measured_bytes[row["axis"]] += row["bytes"]
        return {axis: (None, total) for axis, total in measured_bytes.items()}
    sums: dict[str, tuple[float, float]] = {}
    if not steps or len(verdicts) < ranks:
        return sums
    for rows in verdicts.values():
        for row in rows:
            if row["phase"] != "step":
                continue
            planned, measured = sums.get(row["axis"], (0.0, 0.0))
            sums[row["axis"]] = (
                planned + row["predicted_bytes"] / steps,
                measured + row["measured_bytes"] / steps,
            )
    return sums


def _estimate_tensors(plan: Mapping[str, Any], device: str) -> float | None:
    """Return the planned memory of the fullest rank without the memory of the process itself.

    None for a plan of an older version, and for a small CPU rank whose resident memory is mostly library buffers.
    """
    stages = plan.get("stages") or []
    if not all("memory_bytes" in stage for stage in stages) or not stages:
        return None
    fullest = max(stages, key=lambda stage: int(stage["memory_bytes"]))
    allowance = fullest["memory"].get("allowance", 0)
    if device == "cpu" and fullest["memory_bytes"] - allowance < MIN_TENSOR_BYTES:
        return None
    own = min((plan.get("cluster") or {}).get("reserved_bytes", 0), allowance)
    return float(fullest["memory_bytes"] - own)


def _compare_losses(title: str, name: str, summaries: list[Mapping[str, Any]]) -> Figure:
    """Return the losses at the last step that all runs with losses have. Runs without such a step are not compared."""
    curves = [{point["step"]: point["loss"] for point in summary.get(name) or []} for summary in summaries]
    steps = [set(curve) for curve in curves if curve]
    common = set.intersection(*steps) if steps else set()
    nothing: list[float | None] = [None] * len(curves)
    if common:
        at = max(common)
        ends = {max(curve) for curve in curves if curve}
        which = "" if ends == {at} else ", the last common step"
        return Figure(f"{title} at step {at:,}{which}", "loss", nothing, [curve.get(at) for curve in curves])
    last = [curve[max(curve)] if curve else None for curve in curves]
    return Figure(f"{title} at the last step of each run", "loss", nothing, last, "")


def _format_figure(figure: Figure, baseline: int, runs: list[RunSpeed | None]) -> dict[str, Any]:
    """Return a row, compared with the baseline. `apart` 0.1 means 10% more, `times` 1.1 means 1.1 times as fast."""
    base = figure.measured[baseline]
    cells = [
        {
            "planned": planned,
            "measured": measured,
            "apart": measured / base - 1
            if figure.comparison == "share" and place != baseline and measured is not None and base
            else None,
            "times": compute_speedup(runs[place], runs[baseline])
            if figure.comparison == "speed" and place != baseline
            else None,
            "same": measured == base,
        }
        for place, (planned, measured) in enumerate(zip(figure.planned, figure.measured, strict=True))
    ]
    return {"title": figure.title, "unit": figure.unit, "cells": cells}
