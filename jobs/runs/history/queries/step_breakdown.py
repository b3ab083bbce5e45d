"""Break steps down into parts: means over the steps of the diagnosis, and what made steps slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import fsum
from statistics import median
from typing import Annotated, NamedTuple

from pydantic import Field
from typing_extensions import TypedDict

from contracts.telemetry.items import WARMUP_STEPS
from jobs.core.text import format_unknown_problem, parse_whole_number
from jobs.runs.diagnosis.rank_reports import MEASURED_STEPS, get_num_measured_steps
from jobs.runs.history.queries.tables import MAX_ATTEMPT, MAX_STEP, BadQueryError
from jobs.runs.history.store.query import Columns, HistoryTables, query_history, round_mean
from planner.facts.validation import Problem

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
    data_s: Annotated[float | None, Field(description="null if unknown: a script without a DataLoader.")]
    optimizer_s: Annotated[float | None, Field(description="null if unknown: no optimizer was timed.")]
    exposed: dict[str, float]
    hidden: dict[str, float]


class _Means(NamedTuple):
    """Hold the means of one rank. `weight`: the number of steps."""

    weight: int
    times: tuple[float | None, ...]  # as _TIMES, None if unknown
    by_axis: dict[str, dict[str, float]]


def get_parts_by_rank(tables: HistoryTables) -> Columns:
    means = _compute_means(tables)
    return {
        "rank": list(means),
        **{name: [_round(mean.times[index]) for mean in means.values()] for index, name in enumerate(_TIMES)},
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
    step_s = _compute_weighted_mean((mean.weight, mean.times[0] or 0.0) for mean in means)
    data_s, optimizer_s = (
        _compute_weighted_mean(known)
        if (known := [(m.weight, t) for m in means if (t := m.times[i]) is not None])
        else None
        for i in (1, 2)
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


def _round(value: float | None) -> float | None:
    return None if value is None else round_mean(value)


_MEASURED_ROWS = "FROM steps WHERE step > ? AND exposed IS NOT NULL"


def _get_first_measured(tables: HistoryTables) -> tuple[int]:
    """Return the step after which the measured steps begin, as SQL parameters."""
    [(first, last, ranks)] = tables.fetch_rows("SELECT min(step), max(step), count(DISTINCT rank) FROM steps")
    return (0,) if first is None else (max(first - 1 + WARMUP_STEPS, last - get_num_measured_steps(ranks)),)


def _compute_means(tables: HistoryTables) -> Mapping[int, _Means]:
    after = _get_first_measured(tables)
    means = ", ".join(f"sum({name} * over) / sum(over) FILTER ({name} IS NOT NULL)" for name in _TIMES)
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


MIN_EXCESS = 0.02  # fraction of a step: smaller differences are noise
MIN_ALIKE = 0.7  # fraction of the largest excess from which ranks count as alike
MAX_FINDINGS = 8
OTHER = "compute (remainder)"


class SlowPart(TypedDict):
    """Describe a part of the step that took longer. Seconds are means over ranks and steps."""

    part: Annotated[str, Field(description="Part of the step: exposed, data, optimizer, or compute (remainder).")]
    axis: str | None
    rank: Annotated[int | None, Field(description="Rank with the largest increase. null if all ranks are equal.")]
    host: str | None
    ranks_alike: Annotated[int, Field(description="Number of other ranks with nearly the same increase.")]
    seconds: float
    usual_s: float


class SlowCall(TypedDict):
    """Describe a collective that took longer in traced steps."""

    op: str
    axis: str
    ranks: list[int]
    ended_s: Annotated[
        float,
        Field(description="Median time from the first arrival of a rank to the end of the call, in the chosen steps."),
    ]
    usual_s: Annotated[
        float,
        Field(description="Median time of the same collective in all other steps. 0 if there are no other steps."),
    ]
    last: Annotated[int | None, Field(description="Rank that arrived last most often. null if it varies.")]
    host: str | None


class SlowSteps(TypedDict):
    """Compare chosen steps with all other steps."""

    steps: int
    others: int
    step_s: float
    usual_s: float
    findings: list[SlowPart]
    calls: list[SlowCall]


class NoStepsError(Exception):
    """The range, or the rest of the run, has no steps."""


def parse_step_range(parameters: Mapping[str, Sequence[str]]) -> tuple[int | None, int, int]:
    """Parse attempt (None for the current one), first step, and last step of a URL. Raise BadQueryError."""
    bounds = {"attempt": (1, MAX_ATTEMPT), "from": (1, MAX_STEP), "to": (1, MAX_STEP)}
    problems = [Problem(name[:100], format_unknown_problem(name, bounds)) for name in parameters if name not in bounds]
    values = {
        name: parse_whole_number(parameters[name][0], *bounds[name])
        for name in bounds
        if len(parameters.get(name, ())) == 1
    }
    problems += [
        Problem(name, f"`{name}` needs one whole number from {least} to {most}.")
        for name, (least, most) in bounds.items()
        if values.get(name) is None and (name in parameters or name != "attempt")
    ]
    first, last = values.get("from"), values.get("to")
    if problems or first is None or last is None:
        raise BadQueryError(problems)
    return values.get("attempt"), first, last


def explain_slow_steps(job: str, attempt: int, first: int, last: int) -> SlowSteps:
    """Compare steps `first` to `last` with all others. Raise NoStepsError, and the errors of `query_history`."""
    return query_history(job, attempt, lambda tables: _compare_steps(tables, first, last))


def _compare_steps(tables: HistoryTables, first: int, last: int) -> SlowSteps:
    within = "step BETWEEN ? AND ?"
    # Medians are robust against the first steps of a host, which are slow.
    sides = {
        chosen: (steps, step_s)
        for chosen, steps, step_s in tables.fetch_rows(
            f"SELECT {within} AS chosen, count(DISTINCT step), median(step_s) FROM steps GROUP BY chosen", first, last
        )
    }
    if True not in sides or False not in sides:
        raise NoStepsError(
            "The requested range has no steps." if True not in sides else "The run has no other steps to compare with."
        )
    host_rows = tables.fetch_rows("SELECT rank, any_value(host) FROM gauges WHERE rank >= 0 GROUP BY rank")
    hosts = {rank: host for rank, host in host_rows if host}
    findings = _find_slow_parts(_read_parts(tables, within, first, last), sides[False][1], hosts)
    return {
        "steps": sides[True][0],
        "others": sides[False][0],
        "step_s": round_mean(sides[True][1]),
        "usual_s": round_mean(sides[False][1]),
        "findings": findings,
        "calls": _find_slow_calls(tables, first, last, hosts),
    }


PartKey = tuple[str, str | None]  # part, axis
ByRank = dict[int, tuple[float, float]]  # seconds in the chosen steps and in the others


def _read_parts(tables: HistoryTables, within: str, first: int, last: int) -> dict[PartKey, ByRank]:
    """Return the median of each part by rank, in the chosen steps and in the others."""
    plain = (
        "SELECT rank, step, '{part}' AS part, NULL AS axis, {column} AS seconds"
        " FROM steps WHERE exposed IS NOT NULL AND {column} IS NOT NULL"
    )
    by_axis = (  # a step that does not name an axis was not blocked by it
        "SELECT rank, step, 'exposed' AS part, axis, coalesce(exposed[axis], 0) AS seconds"
        " FROM steps JOIN (SELECT DISTINCT rank, unnest(map_keys(exposed)) AS axis FROM steps) USING (rank)"
        " WHERE exposed IS NOT NULL"
    )
    works = "step_s - coalesce(data_s, 0) - coalesce(optimizer_s, 0)"
    all_parts = " UNION ALL ".join(
        [
            plain.format(part="data", column="data_s"),
            plain.format(part="optimizer", column="optimizer_s"),
            plain.format(part=OTHER, column=f"{works} - coalesce(list_sum(map_values(exposed)), 0)"),
            by_axis,
        ]
    )
    rows = tables.fetch_rows(
        f"SELECT part, axis, rank, median(seconds) FILTER ({within}), median(seconds) FILTER (NOT ({within}))"
        f" FROM ({all_parts}) GROUP BY part, axis, rank",
        *(first, last, first, last),
    )
    parts: dict[PartKey, ByRank] = {}
    for part, axis, rank, seconds, usual in rows:
        parts.setdefault((part, axis), {})[rank] = (seconds or 0.0, usual or 0.0)
    return parts


def _find_slow_parts(parts: dict[PartKey, ByRank], step_s: float, hosts: dict[int, str]) -> list[SlowPart]:
    """Return parts that grew, the largest increase first. Waits for a late rank are included."""
    candidates: list[tuple[float, SlowPart]] = []
    for (part, axis), ranks in parts.items():
        excess = {rank: seconds - usual for rank, (seconds, usual) in ranks.items()}
        worst = max(excess, key=lambda rank: (excess[rank], -rank))
        if excess[worst] < MIN_EXCESS * step_s:
            continue
        alike = [rank for rank, value in excess.items() if value >= MIN_ALIKE * excess[worst]]
        is_everywhere = len(alike) == len(ranks) and len(ranks) > 1
        shown = alike if is_everywhere else [worst]
        finding: SlowPart = {
            "part": part,
            "axis": axis,
            "rank": None if is_everywhere else worst,
            "host": None if is_everywhere else hosts.get(worst),
            "ranks_alike": 0 if is_everywhere else len(alike) - 1,
            "seconds": round_mean(sum(ranks[rank][0] for rank in shown) / len(shown)),
            "usual_s": round_mean(sum(ranks[rank][1] for rank in shown) / len(shown)),
        }
        candidates.append((excess[worst], finding))
    candidates.sort(key=lambda each: -each[0])
    return [finding for _, finding in candidates[:MAX_FINDINGS]]


def _find_slow_calls(tables: HistoryTables, first: int, last: int, hosts: dict[int, str]) -> list[SlowCall]:
    """Return collectives that took longer, by group and op, and the rank that usually arrived last."""
    rows = tables.fetch_rows(
        "SELECT step BETWEEN ? AND ?, op, axis, ranks, max(ended) - min(issued), arg_max(rank, issued)"
        " FROM calls WHERE peer < 0 GROUP BY step, op, axis, ranks, nth, sequence HAVING count(*) = len(ranks)",
        *(first, last),
    )
    by_collective: dict[tuple[str, str, tuple[int, ...]], tuple[list[float], list[float], list[int]]] = {}
    for chosen, op, axis, ranks, seconds, came_last in rows:
        chosen_s, usual_s, last_ranks = by_collective.setdefault((op, axis, tuple(ranks)), ([], [], []))
        (chosen_s if chosen else usual_s).append(seconds)
        if chosen:
            last_ranks.append(came_last)
    slow_calls: list[tuple[float, SlowCall]] = []
    for (op, axis, group), (chosen_s, usual_s, last_ranks) in by_collective.items():
        if not chosen_s or not usual_s or median(chosen_s) < 1.1 * median(usual_s):
            continue
        (rank, times), *_ = Counter(last_ranks).most_common(1)
        usual_last = rank if times > len(last_ranks) / 2 else None
        call: SlowCall = {
            "op": op,
            "axis": axis,
            "ranks": list(group),
            "ended_s": round_mean(median(chosen_s)),
            "usual_s": round_mean(median(usual_s)),
            "last": usual_last,
            "host": hosts.get(usual_last) if usual_last is not None else None,
        }
        slow_calls.append(((median(chosen_s) - median(usual_s)) * len(chosen_s), call))
    slow_calls.sort(key=lambda each: -each[0])
    return [call for _, call in slow_calls[:MAX_FINDINGS]]
