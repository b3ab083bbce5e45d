"""An attempt's curves as other tools keep them: a name, a step, when, and a number."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from jobs.runs.history.store.query import Tables

MOST_POINTS = 10_000  # of a curve; every second, third .. step is told where there are more
MOST_RANKS = 64  # with curves of their own


class Point(NamedTuple):
    """`step` completed, from 1; of what is told by the second, seconds since the attempt's first. `time` is Unix'."""

    curve: str
    step: int
    time: float
    value: float


# By their order, not their numbers: one that claims to be far away would leave no other.
_KEPT = """step IN (SELECT step FROM (
    SELECT step, row_number() OVER (ORDER BY step) AS nth FROM (SELECT DISTINCT step FROM steps)) WHERE nth % ? = 0)
"""
# Of each step over its ranks: the loss is told by those that know it, and a step is as long as its slowest rank's.
_OF_STEPS = f"""
SELECT step, max(time), avg(loss), avg(grad_norm), avg(learning_rate), max(step_s)::DOUBLE,
       max(tokens) / max(step_s)::DOUBLE
FROM steps WHERE {_KEPT} GROUP BY step ORDER BY step
"""
_CURVES = ("loss", "grad_norm", "learning_rate", "step_seconds", "tokens_per_second")
_OF_RANKS = f"SELECT step, time, rank, step_s::DOUBLE FROM steps WHERE {_KEPT} AND rank < ? ORDER BY step, rank"
# A mean over the ranks that told of axes; one that named not this one stood still for it 0 s.
_EXPOSED = f"""
SELECT step, max(time), entry.key, (sum(entry.value) / max(ranks))::DOUBLE
FROM (SELECT step, time, ranks, unnest(map_entries(exposed)) AS entry
    FROM (SELECT *, count(exposed) OVER (PARTITION BY step) AS ranks FROM steps WHERE {_KEPT}))
GROUP BY step, entry.key ORDER BY step, entry.key
"""
_VALIDATED = "SELECT step, time, value FROM marks WHERE kind = 'validation' ORDER BY step"
_SENT = """
SELECT (second // ? - ?) * ? AS since, axis, sum(payload_bytes)::DOUBLE / ?
FROM traffic GROUP BY since, axis ORDER BY since, axis
"""


def scalars(tables: Tables) -> Iterator[Point]:
    """Every curve, each in the order of its steps; what is not finite is left out."""
    for point in _points(tables):
        if point.value is not None and math.isfinite(point.value):
            yield point


def _points(tables: Tables) -> Iterator[Point]:
    [(count,)] = tables.rows("SELECT count(DISTINCT step) FROM steps")
    every = max(1, math.ceil(count / MOST_POINTS))
    for step, time, *values in tables.rows(_OF_STEPS, every):
        for name, value in zip(_CURVES, values, strict=True):
            yield Point(f"train/{name}", step, time, value)
    for step, time, value in tables.rows(_VALIDATED):
        yield Point("validation/loss", step, time, value)
    for step, time, axis, value in tables.rows(_EXPOSED, every):
        yield Point(f"exposed_seconds/{axis}", step, time, value)
    for step, time, rank, value in tables.rows(_OF_RANKS, every, MOST_RANKS):
        yield Point(f"step_seconds/rank_{rank}", step, time, value)
    yield from _sent(tables)


def _sent(tables: Tables) -> Iterator[Point]:
    """Payload bytes a second over all ranks; of merged rows not by less time than such a one covers."""
    [(first, last)] = tables.rows("SELECT min(second), max(second) FROM traffic")
    if first is None:
        return
    width = tables.manifest["merged_s"]
    while last // width - first // width >= MOST_POINTS:
        width *= 2
    start = first // width
    for since, axis, value in tables.rows(_SENT, width, start, width, width):
        yield Point(f"payload_bytes_per_second/{axis}", since, start * width + since, value)
