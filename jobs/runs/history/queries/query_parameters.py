"""Parse the parameters of history queries: attempt, time, steps, ranks, and bins."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from jobs.core.text import format_choice_problem, format_repeated_problem, format_unknown_problem, parse_whole_number
from jobs.runs.history.store.schema import TABLES
from planner.facts.validation import Problem, SpecError

MAX_TIME = float(2**40)  # Unix seconds, later than any stored time

FORMATS = ("json", "csv", "parquet")
GROUPINGS = {
    "traffic": ("rank", "axis", "op", "phase", "group_size"),
    "steps": ("rank",),
    "gauges": ("rank", "node", "host"),
}
DEFAULT_BY = {"traffic": ("rank", "axis", "op"), "steps": (), "gauges": ("rank", "node")}
MAX_BINS = 2000
MAX_ATTEMPT = 2**31 - 1
MAX_STEP = 2**53 - 1
MAX_RANGES = 64
MAX_RANK = 65535
TIME_MESSAGE = "`{name}` is not a valid time. Use Unix seconds."
RANGES_MESSAGE = f'`{{name}}` is invalid. Use at most {MAX_RANGES} ranges such as "0,3,8-15", with a maximum of '

T = TypeVar("T")
Range = tuple[int, int]


class BadQueryError(SpecError):
    """Parameters are invalid on their own, which is a 400.

    Parameters that conflict with each other or with their table raise SpecError, a 422,
    because no schema can express such a conflict.
    """


class NoTableError(Exception):
    """The table does not exist."""


class TableQuery(NamedTuple):
    """Hold parsed parameters, None if they are missing. Both ends of ranges are included."""

    attempt: int | None
    since: float | None
    until: float | None
    steps: tuple[Range, ...] | None
    ranks: tuple[Range, ...] | None
    bins: int | None
    by: tuple[str, ...]
    format: str


QUERY_PARAMETERS = ("attempt", "from", "to", "steps", "ranks", "bins", "by", "format")


def parse_table_query(table: str, parameters: Mapping[str, Sequence[str]], *accepted: str) -> TableQuery:
    """Parse the parameters of a URL.

    Args:
        told: All values of each parameter.
        known: The accepted parameters, all if empty.

    Raises:
        NoTableError: The table does not exist.
        BadQueryError, SpecError: A parameter is invalid.
    """
    if table not in TABLES:
        raise NoTableError(format_choice_problem("table", table, TABLES))
    problems: list[Problem] = []
    accepted = accepted or QUERY_PARAMETERS
    for name, values in parameters.items():
        if name not in accepted:
            problems.append(Problem(name[:100], format_unknown_problem(name, accepted)))
        elif len(values) > 1:
            problems.append(Problem(name, format_repeated_problem(name)))

    def read_parameter(name: str, message: str, reader: Callable[[str], T | None]) -> T | None:
        if name not in parameters:
            return None
        query = reader(parameters[name][-1])
        if query is None:
            problems.append(Problem(name, message.format(name=name)))
        return query

    query = TableQuery(
        attempt=read_parameter(
            "attempt", _make_whole_message(1, MAX_ATTEMPT), lambda text: parse_whole_number(text, 1, MAX_ATTEMPT)
        ),
        since=read_parameter("from", TIME_MESSAGE, parse_time),
        until=read_parameter("to", TIME_MESSAGE, parse_time),
        steps=read_parameter("steps", f"{RANGES_MESSAGE}{MAX_STEP}.", lambda text: _parse_ranges(text, MAX_STEP)),
        ranks=read_parameter("ranks", f"{RANGES_MESSAGE}{MAX_RANK}.", lambda text: _parse_ranges(text, MAX_RANK)),
        bins=read_parameter(
            "bins", _make_whole_message(1, MAX_BINS), lambda text: parse_whole_number(text, 1, MAX_BINS)
        ),
        by=tuple(parameters["by"][-1].split(",")) if "by" in parameters else DEFAULT_BY.get(table, ()),
        format=read_parameter(
            "format", f"`format` is invalid. Use one of {', '.join(FORMATS)}.", lambda t: t if t in FORMATS else None
        )
        or "json",
    )
    conflicts = _find_conflicts(table, query)
    if problems:
        raise BadQueryError([*problems, *conflicts])
    if conflicts:
        raise SpecError(conflicts)
    return query


def _find_conflicts(table: str, query: TableQuery) -> list[Problem]:
    problems = []
    if query.since is not None and query.until is not None and query.since > query.until:
        problems.append(
            Problem(
                "from", f"`from` is {query.since:g}, which is later than `to` ({query.until:g}). Use an earlier `from`."
            )
        )
    groups = GROUPINGS.get(table, ())
    if not set(query.by) <= set(groups) or len(set(query.by)) < len(query.by):
        problems.append(
            Problem(
                "by",
                f"`by` is {','.join(query.by)[:60]!r}. Use one or more of {', '.join(groups)}, separated by commas.",
            )
        )
    if query.bins is not None and table not in GROUPINGS:
        problems.append(
            Problem("bins", f"`bins` works only with {', '.join(GROUPINGS)}, not with {table}. Omit `bins`.")
        )
    if query.steps is not None and "step" not in TABLES[table].names:
        problems.append(
            Problem("steps", f"`steps` works only with tables that have steps, not with {table}. Omit `steps`.")
        )
    return problems


def _make_whole_message(minimum: int, maximum: int) -> str:
    return f"`{{name}}` is invalid. Use a whole number from {minimum} to {maximum}."


def parse_time(text: str) -> float | None:
    """Parse Unix seconds, None if invalid."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and 0 <= seconds < MAX_TIME else None


def _parse_ranges(text: str, maximum: int) -> tuple[Range, ...] | None:
    parts = text.split(",")
    if len(parts) > MAX_RANGES:
        return None
    ranges = []
    for part in parts:
        low, dash, high = part.partition("-")
        first = parse_whole_number(low, 0, maximum)
        last = parse_whole_number(high, 0, maximum) if dash else first
        if first is None or last is None or last < first:
            return None
        ranges.append((first, last))
    return tuple(ranges)
