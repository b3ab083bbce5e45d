"""Some steps beside all the others of their run: which part, axis, rank, host and collective differ, and by how much.

Every figure is a mean over steps, in and beside the range; `more_s` is their difference, seconds a step. The first
steps of a run (`contracts.telemetry.FIRST_STEPS`) are no measure and left out of both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Annotated, NamedTuple

from pydantic import Field
from typing_extensions import TypedDict

from contracts.telemetry import FIRST_STEPS
from jobs.history.query import Tables, ask, short
from planner.facts.spec import Problem, SpecError

MOST_RANKS = 16
MOST_COLLECTIVES = 16


class Beside(TypedDict):
    """Seconds a step, in the range and beside it."""

    name: str
    in_s: float
    beside_s: float
    more_s: float


class RankBeside(Beside):
    """What a rank spent on its own: its step without standing still for collectives."""

    rank: int
    host: str


class CollectiveBeside(Beside):
    """How long collectives of an axis and op took, summed over a step, mean of the ranks that issue them."""

    axis: str
    op: str


class Slow(TypedDict):
    """`step.more_s` is what there is to explain: `parts` without `hidden` and optimizer add up to it."""

    attempt: int
    since: float
    until: float
    steps_in: Annotated[int, Field(description="steps that ended in the range")]
    steps_beside: int
    step: Beside
    parts: Annotated[list[Beside], Field(description="data, compute, and by axis exposed; largest difference first")]
    hidden: Annotated[list[Beside], Field(description="by axis, collectives that ran while ranks computed")]
    optimizer: Beside
    ranks: Annotated[list[RankBeside], Field(description=f"the {MOST_RANKS} that differ most")]
    hosts: Annotated[list[Beside], Field(description="the mean of their ranks")]
    collectives: Annotated[list[CollectiveBeside], Field(description=f"the {MOST_COLLECTIVES} that differ most")]


class Row(NamedTuple):
    """Means of one rank over its steps in the range or beside it."""

    rank: int
    inside: bool
    step_s: float
    data_s: float
    optimizer_s: float
    exposed: Mapping[str, float]
    hidden: Mapping[str, float]


Moved = tuple[str, str, bool, float]  # axis, op, inside, seconds a step


def slow_steps(job: str, attempt: int, since: float, until: float, hosts: Mapping[int, str]) -> Slow:
    """`hosts` by rank.

    Raises:
        SpecError: no step ended in the range, or none beside it.
        GoneError, BusyError
    """

    def work(tables: Tables) -> Slow:
        values: list[object] = [since, until, FIRST_STEPS]
        first = "SELECT min(step) FROM steps"
        mine = "SELECT *, time BETWEEN ? AND ? AS inside FROM steps"
        mine += f" WHERE data_s IS NOT NULL AND step - ({first}) >= ?"
        counted = dict(tables.rows(f"SELECT inside, count(DISTINCT step) FROM ({mine}) GROUP BY inside", *values))
        means = ", ".join(f"sum({name} * over) / sum(over)" for name in ("step_s", "data_s", "optimizer_s"))
        rows = tables.rows(f"SELECT rank, inside, {means}, sum(over) FROM ({mine}) GROUP BY rank, inside", *values)
        axes = {column: _by_axis(tables, column, mine, values) for column in ("exposed", "hidden")}
        found = [
            Row(rank, inside, *times, *(_mean_of(axes[column][rank, inside], over) for column in axes))
            for rank, inside, *times, over in rows
        ]
        told = counted.get(True, 0), counted.get(False, 0)
        return beside(attempt, (since, until), told, found, _moved(tables, since, until, told), hosts)

    return ask(job, attempt, work)


def _mean_of(seconds: Mapping[str, float], over: int) -> dict[str, float]:
    return {axis: total / over for axis, total in seconds.items()}


def _by_axis(tables: Tables, column: str, mine: str, values: list[object]) -> dict[tuple[int, bool], dict[str, float]]:
    """Seconds summed over steps, by rank and whether they are inside."""
    entries = f"SELECT rank, inside, over, unnest(map_entries({column})) AS entry FROM ({mine})"
    sql = f"SELECT rank, inside, entry.key, sum(entry.value * over) FROM ({entries}) GROUP BY ALL"
    found: dict[tuple[int, bool], dict[str, float]] = defaultdict(dict)
    for rank, inside, axis, seconds in tables.rows(sql, *values):
        found[rank, inside][axis] = seconds
    return found


def _moved(tables: Tables, since: float, until: float, steps: tuple[int, int]) -> list[Moved]:
    sql = (
        "SELECT axis, op, second BETWEEN floor(?) AND ? AS inside, sum(busy_s) / count(DISTINCT rank) FROM traffic"
        " WHERE phase = 'step' GROUP BY ALL"
    )
    number = {True: steps[0], False: steps[1]}
    return [
        (axis, op, inside, seconds / number[inside])
        for axis, op, inside, seconds in tables.rows(sql, since, until)
        if number[inside]
    ]


def beside(
    attempt: int,
    span: tuple[float, float],
    steps: tuple[int, int],
    rows: list[Row],
    moved: list[Moved],
    hosts: Mapping[int, str],
) -> Slow:
    """The answer from means of each rank. Pure.

    Raises:
        SpecError: there is nothing to compare.
    """
    if not all(steps):
        words = f"{steps[0]} steps ended in it and {steps[1]} beside it, without the first {FIRST_STEPS}; both need one"
        raise SpecError([Problem("from", words)])
    inside, outside = ([row for row in rows if row.inside is of] for of in (True, False))
    axes = sorted({axis for row in rows for axis in row.exposed})
    hidden = sorted({axis for row in rows for axis in row.hidden})

    def compared(name: str, of: list[float], others: list[float]) -> Beside:
        return _compared(name, _mean(of), _mean(others))

    parts = [
        compared("data", [row.data_s for row in inside], [row.data_s for row in outside]),
        compared("compute", [_compute(row) for row in inside], [_compute(row) for row in outside]),
        *(
            compared(axis, [row.exposed.get(axis, 0.0) for row in inside], [r.exposed.get(axis, 0.0) for r in outside])
            for axis in axes
        ),
    ]
    ranks = _ranks(inside, outside, hosts)
    by_host: dict[str, list[RankBeside]] = defaultdict(list)
    for one in ranks:
        by_host[one["host"]].append(one)
    return {
        "attempt": attempt,
        "since": span[0],
        "until": span[1],
        "steps_in": steps[0],
        "steps_beside": steps[1],
        "step": compared("step", [row.step_s for row in inside], [row.step_s for row in outside]),
        "parts": sorted(parts, key=_most),
        "hidden": [
            compared(axis, [row.hidden.get(axis, 0.0) for row in inside], [r.hidden.get(axis, 0.0) for r in outside])
            for axis in hidden
        ],
        "optimizer": compared("optimizer", [r.optimizer_s for r in inside], [r.optimizer_s for r in outside]),
        "ranks": ranks[:MOST_RANKS],
        "hosts": sorted(
            (
                compared(host, [one["in_s"] for one in mine], [one["beside_s"] for one in mine])
                for host, mine in by_host.items()
            ),
            key=_most,
        ),
        "collectives": _collectives(moved),
    }


def _ranks(inside: list[Row], outside: list[Row], hosts: Mapping[int, str]) -> list[RankBeside]:
    own = {row.rank: _own(row) for row in outside}
    found: list[RankBeside] = [
        {
            **_compared(f"rank {row.rank}", _own(row), own[row.rank]),
            "rank": row.rank,
            "host": hosts.get(row.rank, ""),
        }
        for row in inside
        if row.rank in own
    ]
    return sorted(found, key=_most)


def _collectives(moved: list[Moved]) -> list[CollectiveBeside]:
    seconds = {(axis, op, inside): s for axis, op, inside, s in moved}
    found: list[CollectiveBeside] = [
        {
            **_compared(f"{axis} {op}", seconds.get((axis, op, True), 0.0), seconds.get((axis, op, False), 0.0)),
            "axis": axis,
            "op": op,
        }
        for axis, op in sorted({(axis, op) for axis, op, _, _ in moved})
    ]
    return sorted(found, key=_most)[:MOST_COLLECTIVES]


def _own(row: Row) -> float:
    return row.step_s - sum(row.exposed.values())


def _compute(row: Row) -> float:
    return _own(row) - row.data_s


def _compared(name: str, in_s: float, beside_s: float) -> Beside:
    return {"name": name, "in_s": short(in_s), "beside_s": short(beside_s), "more_s": short(in_s - beside_s)}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _most(one: Beside) -> float:
    return -abs(one["more_s"])
