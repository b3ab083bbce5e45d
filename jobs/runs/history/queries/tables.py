"""Parse queries of history tables, and return rows or bins of these tables as JSON or as files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple, TypeVar

from django.conf import settings
from pydantic import Field
from typing_extensions import TypedDict

from jobs.core.text import format_choice_problem, format_repeated_problem, format_unknown_problem, parse_whole_number
from jobs.runs.history.store.folder import HistoryFolder, HistoryManifest, NoHistoryError, get_num_bytes
from jobs.runs.history.store.query import Columns, HistoryTables, query_history, query_to_file
from jobs.runs.history.store.schema import COUNTERS, GAUGE_NAMES, STEP_MEASURES, TABLES
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


class StoredTable(TypedDict):
    """Describe a stored table."""

    rows: int
    bytes: int


StoredAttempt = TypedDict(
    "StoredAttempt",
    {
        "attempt": int,
        "ended": Annotated[bool, Field(description="True if the attempt has ended, so the data is final.")],
        "from": float | None,
        "to": float | None,
        "bytes": int,
        "tables": dict[str, StoredTable],
        "merged_s": Annotated[int, Field(description="Number of seconds that each row of the oldest traffic covers.")],
        "raw_dropped": Annotated[int, Field(description="Number of traced steps that were deleted to save space.")],
    },
)
StoredAttempt.__doc__ = "The stored history of an attempt."

TableRows = TypedDict(
    "TableRows",
    {
        "table": str,
        "attempt": int,
        "from": float | None,
        "to": float | None,
        "width_s": Annotated[float | None, Field(description="Width of a time bin in seconds. null for raw rows.")],
        "columns": Annotated[
            Columns,
            Field(description="Columns by name, all of the same length. The `time` of a bin is the start of the bin."),
        ],
    },
)
TableRows.__doc__ = "Rows or time bins of a history table."


class History(TypedDict):
    """List the stored attempts of a job, oldest first."""

    job: str
    attempts: list[StoredAttempt]


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
    """Parse the parameters of a URL, of which `accepted` are allowed, or all.

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

    def read_whole(name: str, maximum: int) -> int | None:
        message = f"`{{name}}` is invalid. Use a whole number from 1 to {maximum}."
        return read_parameter(name, message, lambda text: parse_whole_number(text, 1, maximum))

    def read_ranges(name: str, maximum: int) -> tuple[Range, ...] | None:
        return read_parameter(name, f"{RANGES_MESSAGE}{maximum}.", lambda text: _parse_ranges(text, maximum))

    formats_message = f"`format` is invalid. Use one of {', '.join(FORMATS)}."
    query = TableQuery(
        attempt=read_whole("attempt", MAX_ATTEMPT),
        since=read_parameter("from", TIME_MESSAGE, parse_time),
        until=read_parameter("to", TIME_MESSAGE, parse_time),
        steps=read_ranges("steps", MAX_STEP),
        ranks=read_ranges("ranks", MAX_RANK),
        bins=read_whole("bins", MAX_BINS),
        by=tuple(parameters["by"][-1].split(",")) if "by" in parameters else DEFAULT_BY.get(table, ()),
        format=read_parameter("format", formats_message, lambda text: text if text in FORMATS else None) or "json",
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
        message = f"`from` is {query.since:g}, which is later than `to` ({query.until:g}). Use an earlier `from`."
        problems.append(Problem("from", message))
    groups = GROUPINGS.get(table, ())
    if not set(query.by) <= set(groups) or len(set(query.by)) < len(query.by):
        use = f"Use one or more of {', '.join(groups)}, separated by commas."
        problems.append(Problem("by", f"`by` is {','.join(query.by)[:60]!r}. {use}"))
    if query.bins is not None and table not in GROUPINGS:
        message = f"`bins` works only with {', '.join(GROUPINGS)}, not with {table}. Omit `bins`."
        problems.append(Problem("bins", message))
    if query.steps is not None and "step" not in TABLES[table].names:
        message = f"`steps` works only with tables that have steps, not with {table}. Omit `steps`."
        problems.append(Problem("steps", message))
    return problems


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


CONTROL_CODES = (*range(0x20), *range(0x7F, 0xA0))
FORMULA_STARTS = "'=', '+', '-', '@', ''''"


def format_as_cells(sql: str, types: Mapping[str, str]) -> str:
    """Return SQL for the same rows as CSV cells that terminals and spreadsheets do not execute.

    Lists and maps are JSON. In text, a backslash and control characters are escaped as in JSON (`\\\\`, `\\u001b`).
    Text that begins with = + - @ or an apostrophe gets an apostrophe before it.

    Args:
        types: The name of the DuckDB type of each column.
    """
    return f"SELECT {', '.join(f'{_make_cell(name, kind)} AS {name}' for name, kind in types.items())} FROM ({sql})"


def _make_cell(name: str, kind: str) -> str:
    if kind.startswith("MAP"):  # JSON would write 32-bit floats with the digits of 64 bits
        return f"to_json(CAST(CAST({name} AS MAP(VARCHAR, VARCHAR)) AS MAP(VARCHAR, DOUBLE)))"
    if kind.endswith("[]"):
        return _escape(f"CAST(to_json({name}) AS VARCHAR)")
    if kind != "VARCHAR":
        return name
    text = _escape(f"replace({name}, '\\', '\\\\')")
    return f"CASE WHEN {name}[1] IN ({FORMULA_STARTS}) THEN '''' ELSE '' END || {text}"


def _escape(text: str) -> str:
    escaped = reduce(lambda inner, code: f"replace({inner}, chr({code}), '\\u{code:04x}')", CONTROL_CODES, text)
    return f"(CASE WHEN regexp_matches({text}, '[\\x00-\\x1f\\x7f-\\x{{9f}}]') THEN {escaped} ELSE {text} END)"


MAX_JSON_ROWS = 100_000  # files have no limit
TIME_COLUMNS = {
    **dict.fromkeys(("steps", "gauges", "marks", "logs", "metrics"), "time"),
    "traffic": "second",
    "calls": "issued",
    "spans": "began",
}
SORT_ORDERS = {
    "calls": "issued, rank",
    "spans": "began, rank",
    "traffic": "second, rank, axis, op",
    "logs": "time, rank, first",
    "metrics": "time, rank, name",
}
COPY_OPTIONS = {"csv": "FORMAT csv, HEADER", "parquet": "FORMAT parquet, COMPRESSION zstd"}


class SqlQuery(NamedTuple):
    """Hold SQL and the values of its placeholders. SQL contains only Meshboard's own names."""

    sql: str
    values: list[object]
    since: float | None = None
    until: float | None = None
    width_s: float | None = None


def list_attempts(job: str) -> list[StoredAttempt]:
    """Return the stored attempts of a job, oldest first."""
    root: Path = settings.HISTORY_DIR
    stored = []
    names = (path.name for path in (root / job).glob("*"))
    for number in sorted(int(name) for name in names if name.isascii() and name.isdigit()):
        try:
            stored.append(_describe_attempt(HistoryFolder(root, job, number).read_manifest()))
        except NoHistoryError:
            continue
    return stored


def _describe_attempt(manifest: HistoryManifest) -> StoredAttempt:
    return {
        "attempt": manifest["attempt"],
        "ended": manifest["ended"] is not None,
        "from": manifest["first"],
        "to": manifest["last"],
        "bytes": get_num_bytes(manifest),
        "tables": {
            table: {"rows": sum(part["rows"] for part in parts), "bytes": get_num_bytes(manifest, (table,))}
            for table, parts in manifest["parts"].items()
        },
        "merged_s": manifest["merged_s"],
        "raw_dropped": manifest["raw_dropped"],
    }


def read_rows(job: str, attempt: int, table: str, parameters: TableQuery) -> TableRows:
    """Return rows or bins of a table. Raise SpecError if they are too many, and the errors of `query_history`."""
    return query_history(job, attempt, lambda tables: _query_rows(tables, table, parameters))


def _query_rows(tables: HistoryTables, table: str, parameters: TableQuery) -> TableRows:
    query = _make_query(tables, table, parameters)
    columns = tables.fetch_columns(f"{query.sql} LIMIT {MAX_JSON_ROWS + 1}", *query.values)
    count = len(next(iter(columns.values())))
    if count > MAX_JSON_ROWS:
        [(all_rows,)] = tables.fetch_rows(f"SELECT count(*) FROM ({query.sql})", *query.values)
        message = (
            f"The answer has {all_rows:,} rows, but the maximum for JSON is {MAX_JSON_ROWS:,}. "
            "Use bins, fewer ranks, a shorter time range, or format csv or parquet."
        )
        raise SpecError([Problem("format", message)])
    return {
        "table": table,
        "attempt": tables.manifest["attempt"],
        "from": query.since,
        "to": query.until,
        "width_s": query.width_s,
        "columns": columns,
    }


def read_as_file(job: str, attempt: int, table: str, parameters: TableQuery) -> BinaryIO:
    """Return all rows as a file that is deleted once it is closed. Raise the errors of `query_history`."""

    def write(tables: HistoryTables, path: Path) -> None:
        query = _make_query(tables, table, parameters)
        sql, values = query.sql, query.values
        if parameters.format == "csv":
            described = tables.fetch_rows(f"DESCRIBE {sql}", *values)
            sql = format_as_cells(sql, {name: kind for name, kind, *_ in described})
        tables.copy_to_file(sql, values, path, COPY_OPTIONS[parameters.format])

    return query_to_file(job, attempt, write)


def _make_query(tables: HistoryTables, table: str, parameters: TableQuery) -> SqlQuery:
    where, values = _make_filter(table, parameters)
    if parameters.bins is None:
        sql = f"SELECT * FROM {table} WHERE {where} ORDER BY {SORT_ORDERS.get(table, f'{TIME_COLUMNS[table]}, rank')}"
        return SqlQuery(sql, values, parameters.since, parameters.until)
    since = parameters.since if parameters.since is not None else tables.manifest["first"] or 0.0
    until = parameters.until if parameters.until is not None else tables.manifest["last"] or since
    width = max((until - since) / parameters.bins, _get_min_width(tables.manifest, since))
    last_bin = parameters.bins - 1
    bin_sql = f"least(greatest(floor(({TIME_COLUMNS[table]} - ?) / ?), 0), ?)::BIGINT"
    by = "".join(f", {name}" for name in parameters.by)
    selected = f"? + ? * bin AS time{by}, {_BIN_COLUMNS[table]}"
    inner = f"SELECT *, {bin_sql} AS bin FROM {table} WHERE {where}"
    sql = f"SELECT {selected} FROM ({inner}) GROUP BY bin{by} ORDER BY bin{by}"
    return SqlQuery(sql, [since, width, since, width, last_bin, *values], since, until, width)


def _get_min_width(manifest: HistoryManifest, since: float) -> float:
    """Return the minimum width of a bin in seconds. Narrower bins between merged rows would be empty."""
    first, last, merged_s = manifest["first"], manifest["last"], manifest["merged_s"]
    if first is None or last is None or merged_s == 1 or since >= last - (last - first) / merged_s:
        return 1e-6
    return float(merged_s)


def _make_filter(table: str, parameters: TableQuery) -> tuple[str, list[object]]:
    terms, values = ["true"], list[object]()
    if parameters.since is not None:
        terms.append(f"{TIME_COLUMNS[table]} >= ?")
        values.append(parameters.since)
    if parameters.until is not None:
        terms.append(f"{TIME_COLUMNS[table]} <= ?")
        values.append(parameters.until)
    for column, ranges in (("rank", parameters.ranks), ("step", parameters.steps)):
        if ranges is not None:
            terms.append("(" + " OR ".join([f"{column} BETWEEN ? AND ?"] * len(ranges)) + ")")
            values += [end for ends in ranges for end in ends]
    return " AND ".join(terms), values


def _make_step_columns() -> str:
    """Return SQL for measures of steps. A merged row covers `over` steps, and names the last one."""
    ends = [
        f"min({name})::DOUBLE AS {name}_min, "
        f"sum({name} * over) / sum(over) FILTER ({name} IS NOT NULL) AS {name}_mean, "
        f"max({name})::DOUBLE AS {name}_max"
        for name in STEP_MEASURES
    ]
    steps = "list_sum([row.over for row in list(DISTINCT {'step': step, 'over': over})])::BIGINT"
    counted = f"min(step - over + 1) AS first_step, max(step) AS last_step, {steps} AS steps, count(*) AS rows"
    return f"{counted}, {', '.join(ends)}"


_BIN_COLUMNS: dict[str, str] = {
    "traffic": ", ".join(
        f"sum({name}) AS {name}" if name == "busy_s" else f"try_cast(sum({name}) AS BIGINT) AS {name}"
        for name in COUNTERS
    ),
    "steps": _make_step_columns(),
    "gauges": ", ".join(f"avg({name}) AS {name}_mean, max({name}) AS {name}_max" for name in GAUGE_NAMES),
}


def get_file_name(job: str, attempt: int, table: str, suffix: str) -> str:
    return f"{job}-{attempt}-{table}.{suffix}"
