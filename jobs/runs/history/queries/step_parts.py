"""Compute mean step parts over the same steps as the diagnosis, so that all pages agree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import fsum
from typing import Annotated, NamedTuple

from pydantic import Field
from typing_extensions import TypedDict

from contracts.telemetry.vocabulary import WARMUP_STEPS
from jobs.runs.diagnosis.step_times import MEASURED_STEPS, get_num_measured_steps
from jobs.runs.history.queries.schemas import Columns
from jobs.runs.history.store.query import HistoryTables, round_mean

_TIMES = ("step_s", "data_s", "optimizer_s")
_BY_AXIS = ("exposed", "hidden")


class MeanStepParts(TypedDict):
    """Hold means over ranks and steps in seconds per step, without checkpoints."""

    steps: Annotated[
        int,
        Field(
            description=f"Number of averaged steps. "
            f"At most the last {MEASURED_STEPS}, and never the first {WARMUP_STEPS}."
        ),
    ]
    step_s: float
    data_s: float
    optimizer_s: float
    exposed: dict[str, float]
    hidden: dict[str, float]


class _Means(NamedTuple):
    """Hold the means of one rank. `weight`: the number of steps."""

    weight: int
    times: tuple[float, ...]  # as _TIMES
    by_axis: dict[str, dict[str, float]]


def get_parts_by_rank(tables: HistoryTables) -> Columns:
    means = _compute_means(tables)
    return {
        "rank": list(means),
        **{name: [round_mean(mean.times[index]) for mean in means.values()] for index, name in enumerate(_TIMES)},
        **{
            name: [{axis: round_mean(s) for axis, s in mean.by_axis[name].items()} for mean in means.values()]
            for name in _BY_AXIS
        },
    }


def get_mean_parts(tables: HistoryTables) -> MeanStepParts | None:
    """Return the means over all ranks, None before a step is measured."""
    means = _compute_means(tables).values()
    if not means:
        return None
    [(steps,)] = tables.fetch_rows(f"SELECT count(DISTINCT step) {_MEASURED_ROWS}", *_get_first_measured(tables))
    step_s, data_s, optimizer_s = (
        _compute_weighted_mean((mean.weight, mean.times[index]) for mean in means) for index in range(len(_TIMES))
    )
    exposed, hidden = (
        {
            axis: _compute_weighted_mean((mean.weight, mean.by_axis[name].get(axis, 0.0)) for mean in means)
            for axis in sorted({axis for mean in means for axis in mean.by_axis[name]})
        }
        for name in _BY_AXIS
    )
    return {
        "steps": steps,
        "step_s": step_s,
        "data_s": data_s,
        "optimizer_s": optimizer_s,
        "exposed": exposed,
        "hidden": hidden,
    }


def _compute_weighted_mean(weighted: Iterable[tuple[int, float]]) -> float:
    pairs = list(weighted)
    return round_mean(fsum(weight * value for weight, value in pairs) / sum(weight for weight, _ in pairs))


_MEASURED_ROWS = "FROM steps WHERE step > ? AND data_s IS NOT NULL"


def _get_first_measured(tables: HistoryTables) -> tuple[int]:
    """Return the step after which the measured steps begin, as SQL parameters."""
    [(first, last, ranks)] = tables.fetch_rows("SELECT min(step), max(step), count(DISTINCT rank) FROM steps")
    return (0,) if first is None else (max(first - 1 + WARMUP_STEPS, last - get_num_measured_steps(ranks)),)


def _compute_means(tables: HistoryTables) -> Mapping[int, _Means]:
    after = _get_first_measured(tables)
    means = ", ".join(f"sum({name} * over) / sum(over)" for name in _TIMES)
    rows = tables.fetch_rows(f"SELECT rank, sum(over), {means} {_MEASURED_ROWS} GROUP BY rank ORDER BY rank", *after)
    means_by_rank = {
        rank: _Means(int(weight), tuple(times), {name: {} for name in _BY_AXIS}) for rank, weight, *times in rows
    }
    for name in _BY_AXIS:
        entries = f"SELECT rank, over, unnest(map_entries({name})) AS entry {_MEASURED_ROWS}"
        sums = f"SELECT rank, entry.key, sum(entry.value * over) FROM ({entries}) GROUP BY ALL ORDER BY ALL"
        for rank, axis, seconds in tables.fetch_rows(sums, *after):
            means_by_rank[rank].by_axis[name][axis] = seconds / means_by_rank[rank].weight
    return means_by_rank
