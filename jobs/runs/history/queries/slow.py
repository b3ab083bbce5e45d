"""Which part, axis, rank and collective of some steps took longer than in the others: what dragging over them tells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from jobs.core.text import unknown_problem, whole_number
from jobs.runs.history.queries.asked import MOST_ATTEMPTS, MOST_STEP, BadQueryError
from jobs.runs.history.store.query import Tables, ask, short
from planner.facts.validation import Problem

LEAST_SHARE = 0.02  # of a step: what differs by less is noise
ALIKE = 0.7  # of the largest excess: ranks that have as much of it are alike
MOST_FOUND = 8
OTHER = "compute (remainder)"


class Finding(TypedDict):
    """A part of a step that took longer. Seconds are means over ranks and steps."""

    part: Annotated[str, Field(description="Part of the step: exposed, data, optimizer, or compute (remainder).")]
    axis: str | None
    rank: Annotated[int | None, Field(description="Rank with the largest increase. null if all ranks are equal.")]
    host: str | None
    ranks_alike: Annotated[int, Field(description="Number of other ranks with nearly the same increase.")]
    seconds: float
    usual_s: float


class SlowCall(TypedDict):
    """A collective that took longer, in the steps that were told event by event."""

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


class Slow(TypedDict):
    """Some steps beside all others."""

    steps: int
    others: int
    step_s: float
    usual_s: float
    findings: list[Finding]
    calls: list[SlowCall]


class NoStepsError(Exception):
    """There is nothing on one of the two sides."""


def asked_steps(told: Mapping[str, Sequence[str]]) -> tuple[int | None, int, int]:
    """Attempt (None: the current one), first and last step of an address.

    Raises:
        BadQueryError: naming each parameter that makes no sense.
    """
    bounds = {"attempt": (1, MOST_ATTEMPTS), "from": (1, MOST_STEP), "to": (1, MOST_STEP)}
    problems = [Problem(name[:100], unknown_problem(name, bounds)) for name in told if name not in bounds]
    found = {name: whole_number(told[name][0], *bounds[name]) for name in bounds if len(told.get(name, ())) == 1}
    problems += [
        Problem(name, f"`{name}` needs one whole number from {least} to {most}.")
        for name, (least, most) in bounds.items()
        if found.get(name) is None and (name in told or name != "attempt")
    ]
    first, last = found.get("from"), found.get("to")
    if problems or first is None or last is None:
        raise BadQueryError(problems)
    return found.get("attempt"), first, last


def slow(job: str, attempt: int, first: int, last: int) -> Slow:
    """Steps `first` to `last` beside the others.

    Raises:
        NoStepsError: the range, or the rest of the run, has no steps.
        GoneError: there is no history.
        BusyError: too much is asked at once.
    """
    return ask(job, attempt, lambda tables: _slow(tables, first, last))


def _slow(tables: Tables, first: int, last: int) -> Slow:
    within = "step BETWEEN ? AND ?"
    # A host's first steps are none like the others: what is compared with is the median, which they do not move.
    sides = {
        chosen: (steps, step_s)
        for chosen, steps, step_s in tables.rows(
            f"SELECT {within} AS chosen, count(DISTINCT step), median(step_s) FROM steps GROUP BY chosen", first, last
        )
    }
    if True not in sides or False not in sides:
        raise NoStepsError(
            "The requested range has no steps." if True not in sides else "The run has no other steps to compare with."
        )
    hosts = _hosts(tables)
    found = _findings(_parts(tables, within, first, last), sides[False][1], hosts)
    return {
        "steps": sides[True][0],
        "others": sides[False][0],
        "step_s": short(sides[True][1]),
        "usual_s": short(sides[False][1]),
        "findings": found,
        "calls": _calls(tables, first, last, hosts),
    }


Key = tuple[str, str | None]  # part, axis
ByRank = dict[int, tuple[float, float]]  # seconds in the chosen steps, and usually


def _parts(tables: Tables, within: str, first: int, last: int) -> dict[Key, ByRank]:
    """Medians of every part by rank, on both sides."""
    plain = "SELECT rank, step, '{part}' AS part, NULL AS axis, {column} AS seconds FROM steps WHERE data_s IS NOT NULL"
    by_axis = (  # a step that does not name an axis did not stand still in it
        "SELECT rank, step, 'exposed' AS part, axis, coalesce(exposed[axis], 0) AS seconds"
        " FROM steps JOIN (SELECT DISTINCT rank, unnest(map_keys(exposed)) AS axis FROM steps) USING (rank)"
        " WHERE data_s IS NOT NULL"
    )
    rest = "step_s - data_s - optimizer_s - list_sum(map_values(exposed))"
    told = " UNION ALL ".join(
        [
            plain.format(part="data", column="data_s"),
            plain.format(part="optimizer", column="optimizer_s"),
            plain.format(part=OTHER, column=f"coalesce({rest}, step_s - data_s - optimizer_s)"),
            by_axis,
        ]
    )
    rows = tables.rows(
        f"SELECT part, axis, rank, median(seconds) FILTER ({within}), median(seconds) FILTER (NOT ({within}))"
        f" FROM ({told}) GROUP BY part, axis, rank",
        *(first, last, first, last),
    )
    found: dict[Key, ByRank] = {}
    for part, axis, rank, seconds, usual in rows:
        found.setdefault((part, axis), {})[rank] = (seconds or 0.0, usual or 0.0)
    return found


def _findings(parts: dict[Key, ByRank], step_s: float, hosts: dict[int, str]) -> list[Finding]:
    """Parts that grew, the most first. Where one rank was held up, what the others waited for it is told too."""
    found: list[tuple[float, Finding]] = []
    for (part, axis), ranks in parts.items():
        grew = {rank: seconds - usual for rank, (seconds, usual) in ranks.items()}
        most = max(grew, key=lambda rank: (grew[rank], -rank))
        if grew[most] < LEAST_SHARE * step_s:
            continue
        alike = [rank for rank, excess in grew.items() if excess >= ALIKE * grew[most]]
        everybody = len(alike) == len(ranks) and len(ranks) > 1
        told = alike if everybody else [most]
        finding: Finding = {
            "part": part,
            "axis": axis,
            "rank": None if everybody else most,
            "host": None if everybody else hosts.get(most),
            "ranks_alike": 0 if everybody else len(alike) - 1,
            "seconds": short(sum(ranks[rank][0] for rank in told) / len(told)),
            "usual_s": short(sum(ranks[rank][1] for rank in told) / len(told)),
        }
        found.append((grew[most], finding))
    found.sort(key=lambda each: -each[0])
    return [finding for _, finding in found[:MOST_FOUND]]


def _calls(tables: Tables, first: int, last: int, hosts: dict[int, str]) -> list[SlowCall]:
    """By group and op, how long its calls took on each side, and who came last to them."""
    rows = tables.rows(
        "SELECT step BETWEEN ? AND ?, op, axis, ranks, max(ended) - min(issued), arg_max(rank, issued)"
        " FROM calls WHERE peer < 0 GROUP BY step, op, axis, ranks, nth, sequence HAVING count(*) = len(ranks)",
        *(first, last),
    )
    sides: dict[tuple[str, str, tuple[int, ...]], tuple[list[float], list[float], list[int]]] = {}
    for chosen, op, axis, ranks, seconds, came_last in rows:
        took, usual, who = sides.setdefault((op, axis, tuple(ranks)), ([], [], []))
        (took if chosen else usual).append(seconds)
        if chosen:
            who.append(came_last)
    found: list[tuple[float, SlowCall]] = []
    for (op, axis, group), (took, usual, who) in sides.items():
        if not took or not usual or median(took) < 1.1 * median(usual):
            continue
        (rank, times), *_ = Counter(who).most_common(1)
        late = rank if times > len(who) / 2 else None
        call: SlowCall = {
            "op": op,
            "axis": axis,
            "ranks": list(group),
            "ended_s": short(median(took)),
            "usual_s": short(median(usual)),
            "last": late,
            "host": hosts.get(late) if late is not None else None,
        }
        found.append(((median(took) - median(usual)) * len(took), call))
    found.sort(key=lambda each: -each[0])
    return [call for _, call in found[:MOST_FOUND]]


def _hosts(tables: Tables) -> dict[int, str]:
    """The host of each rank, as far as its gauges or starts tell it."""
    rows: list[tuple[Any, ...]] = tables.rows("SELECT rank, any_value(host) FROM gauges WHERE rank >= 0 GROUP BY rank")
    return {rank: host for rank, host in rows if host}
