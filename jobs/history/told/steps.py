"""Steps that the history has event by event."""

from __future__ import annotations

from jobs.history.kept.folder import GoneError
from jobs.history.kept.query import Tables, ask
from jobs.traces.shapes import Trace, of_tables

MOST_STEPS = 1000  # told of, the newest


def steps_kept(job: str, attempt: int) -> list[int]:
    """Which steps there are, in order; none of what was never recorded.

    Raises:
        BusyError: too much is asked at once.
    """
    sql = "SELECT DISTINCT step FROM calls UNION SELECT DISTINCT step FROM spans ORDER BY step DESC LIMIT ?"
    try:
        found = ask(job, attempt, lambda tables: tables.rows(sql, MOST_STEPS))
    except GoneError:
        return []
    return sorted(step for (step,) in found)


def step_kept(job: str, attempt: int, step: int) -> Trace | None:
    """A step's events, None where there are none.

    Raises:
        BusyError: too much is asked at once.
    """

    def read(tables: Tables) -> Trace:
        calls = tables.columns("SELECT * FROM calls WHERE step = ? ORDER BY issued, rank", step)
        spans = tables.columns("SELECT * FROM spans WHERE step = ? ORDER BY began, rank", step)
        return of_tables(calls, spans)

    try:
        found = ask(job, attempt, read)
    except GoneError:
        return None
    return found if found.calls or found.spans else None
