"""What a step was spent on: means over the steps that a diagnosis measures, so that no page tells of others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import fsum
from typing import Annotated, NamedTuple

from pydantic import Field
from typing_extensions import TypedDict

from contracts.telemetry.vocabulary import WARMUP_STEPS
from jobs.runs.diagnosis.course.steps import LATELY, steps_measured
from jobs.runs.history.queries.shapes import Columns
from jobs.runs.history.store.query import Tables, short

_TIMES = ("step_s", "data_s", "optimizer_s")
_BY_AXIS = ("exposed", "hidden")


class Parts(TypedDict):
    """Means over ranks and steps, seconds a step; without the checkpoints that a diagnosis adds."""

    steps: Annotated[
        int,
        Field(description=f"Number of averaged steps. At most the last {LATELY}, and never the first {WARMUP_STEPS}."),
    ]
    step_s: float
    data_s: float
    optimizer_s: float
    exposed: dict[str, float]
    hidden: dict[str, float]


class _Means(NamedTuple):
    """Of one rank. `weight`: steps that they are of."""

    weight: int
    times: tuple[float, ...]  # as _TIMES
    by_axis: dict[str, dict[str, float]]


def parts_by_rank(tables: Tables) -> Columns:
    found = _means(tables)
    return {
        "rank": list(found),
        **{name: [short(one.times[place]) for one in found.values()] for place, name in enumerate(_TIMES)},
        **{
            name: [{axis: short(s) for axis, s in one.by_axis[name].items()} for one in found.values()]
            for name in _BY_AXIS
        },
    }


def parts_together(tables: Tables) -> Parts | None:
    """Of all ranks; None before a step is measured."""
    found = _means(tables).values()
    if not found:
        return None
    [(steps,)] = tables.rows(f"SELECT count(DISTINCT step) {_MEASURED}", *_measured(tables))
    step_s, data_s, optimizer_s = (
        _together((one.weight, one.times[place]) for one in found) for place in range(len(_TIMES))
    )
    exposed, hidden = (
        {
            axis: _together((one.weight, one.by_axis[name].get(axis, 0.0)) for one in found)
            for axis in sorted({axis for one in found for axis in one.by_axis[name]})
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


def _together(weighted: Iterable[tuple[int, float]]) -> float:
    told = list(weighted)
    return short(fsum(weight * value for weight, value in told) / sum(weight for weight, _ in told))


_MEASURED = "FROM steps WHERE step > ? AND data_s IS NOT NULL"


def _measured(tables: Tables) -> tuple[int]:
    """The step after which those begin that a diagnosis measures."""
    [(first, last, ranks)] = tables.rows("SELECT min(step), max(step), count(DISTINCT rank) FROM steps")
    return (0,) if first is None else (max(first - 1 + WARMUP_STEPS, last - steps_measured(ranks)),)


def _means(tables: Tables) -> Mapping[int, _Means]:
    after = _measured(tables)
    means = ", ".join(f"sum({name} * over) / sum(over)" for name in _TIMES)
    rows = tables.rows(f"SELECT rank, sum(over), {means} {_MEASURED} GROUP BY rank ORDER BY rank", *after)
    found = {rank: _Means(int(weight), tuple(times), {name: {} for name in _BY_AXIS}) for rank, weight, *times in rows}
    for name in _BY_AXIS:
        entries = f"SELECT rank, over, unnest(map_entries({name})) AS entry {_MEASURED}"
        sums = f"SELECT rank, entry.key, sum(entry.value * over) FROM ({entries}) GROUP BY ALL ORDER BY ALL"
        for rank, axis, seconds in tables.rows(sums, *after):
            found[rank].by_axis[name][axis] = seconds / found[rank].weight
    return found
