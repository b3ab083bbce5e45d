"""What may be asked of a table: attempt, time, steps, ranks, bins; each parameter that makes no sense is named."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from jobs.core.text import choice_problem, repeated_problem, unknown_problem, whole_number
from jobs.runs.history.store.tables import TABLES
from planner.facts.validation import Problem, SpecError

LATEST_ASKED = float(2**40)  # unix seconds: later than all that is told, and promised to be understood

FORMATS = ("json", "csv", "parquet")
BY = {"traffic": ("rank", "axis", "op", "phase", "group_size"), "steps": ("rank",), "gauges": ("rank", "node", "host")}
USUALLY_BY = {"traffic": ("rank", "axis", "op"), "steps": (), "gauges": ("rank", "node")}
MOST_BINS = 2000
MOST_ATTEMPTS = 2**31 - 1
MOST_STEP = 2**53 - 1
MOST_RANGES = 64
HIGHEST_RANK = 65535
TIME_WORDS = "`{name}` is not a valid time. Use Unix seconds."
RANGES_WORDS = f'`{{name}}` is invalid. Use at most {MOST_RANGES} ranges such as "0,3,8-15", with a maximum of '

T = TypeVar("T")
Range = tuple[int, int]


class BadQueryError(SpecError):
    """Of parameters that make no sense by themselves, which are 400; of those that make none together, or of their
    table, it is a SpecError, which is 422: no document can say it."""


class NoTableError(Exception):
    """The address names none that there is."""


class Asked(NamedTuple):
    """None where nothing was asked. Both ends of ranges count."""

    attempt: int | None
    since: float | None
    until: float | None
    steps: tuple[Range, ...] | None
    ranks: tuple[Range, ...] | None
    bins: int | None
    by: tuple[str, ...]
    format: str


KNOWN = ("attempt", "from", "to", "steps", "ranks", "bins", "by", "format")


def asked(table: str, told: Mapping[str, Sequence[str]], *known: str) -> Asked:
    """The parameters of an address, each with all its values; all there are where none are said to be known.

    Raises:
        NoTableError: there is no such table.
        BadQueryError, SpecError: naming each that makes no sense.
    """
    if table not in TABLES:
        raise NoTableError(choice_problem("table", table, TABLES))
    problems: list[Problem] = []
    known = known or KNOWN
    for name, values in told.items():
        if name not in known:
            problems.append(Problem(name[:100], unknown_problem(name, known)))
        elif len(values) > 1:
            problems.append(Problem(name, repeated_problem(name)))

    def read(name: str, words: str, reader: Callable[[str], T | None]) -> T | None:
        if name not in told:
            return None
        found = reader(told[name][-1])
        if found is None:
            problems.append(Problem(name, words.format(name=name)))
        return found

    found = Asked(
        attempt=read("attempt", _whole(1, MOST_ATTEMPTS), lambda text: whole_number(text, 1, MOST_ATTEMPTS)),
        since=read("from", TIME_WORDS, a_time),
        until=read("to", TIME_WORDS, a_time),
        steps=read("steps", f"{RANGES_WORDS}{MOST_STEP}.", lambda text: _ranges(text, MOST_STEP)),
        ranks=read("ranks", f"{RANGES_WORDS}{HIGHEST_RANK}.", lambda text: _ranges(text, HIGHEST_RANK)),
        bins=read("bins", _whole(1, MOST_BINS), lambda text: whole_number(text, 1, MOST_BINS)),
        by=tuple(told["by"][-1].split(",")) if "by" in told else USUALLY_BY.get(table, ()),
        format=read(
            "format", f"`format` is invalid. Use one of {', '.join(FORMATS)}.", lambda t: t if t in FORMATS else None
        )
        or "json",
    )
    clashes = _together(table, found)
    if problems:
        raise BadQueryError([*problems, *clashes])
    if clashes:
        raise SpecError(clashes)
    return found


def _together(table: str, found: Asked) -> list[Problem]:
    problems = []
    if found.since is not None and found.until is not None and found.since > found.until:
        problems.append(
            Problem(
                "from", f"`from` is {found.since:g}, which is later than `to` ({found.until:g}). Use an earlier `from`."
            )
        )
    groups = BY.get(table, ())
    if not set(found.by) <= set(groups) or len(set(found.by)) < len(found.by):
        problems.append(
            Problem(
                "by",
                f"`by` is {','.join(found.by)[:60]!r}. Use one or more of {', '.join(groups)}, separated by commas.",
            )
        )
    if found.bins is not None and table not in BY:
        problems.append(Problem("bins", f"`bins` works only with {', '.join(BY)}, not with {table}. Omit `bins`."))
    if found.steps is not None and "step" not in TABLES[table].names:
        problems.append(
            Problem("steps", f"`steps` works only with tables that have steps, not with {table}. Omit `steps`.")
        )
    return problems


def _whole(least: int, most: int) -> str:
    return f"`{{name}}` is invalid. Use a whole number from {least} to {most}."


def a_time(text: str) -> float | None:
    """Unix seconds."""
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) and 0 <= found < LATEST_ASKED else None


def _ranges(text: str, most: int) -> tuple[Range, ...] | None:
    parts = text.split(",")
    if len(parts) > MOST_RANGES:
        return None
    found = []
    for part in parts:
        low, dash, high = part.partition("-")
        first = whole_number(low, 0, most)
        last = whole_number(high, 0, most) if dash else first
        if first is None or last is None or last < first:
            return None
        found.append((first, last))
    return tuple(found)
