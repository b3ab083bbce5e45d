"""Return rows or bins of stored tables as JSON or as files."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from pathlib import Path
from typing import BinaryIO, NamedTuple

from django.conf import settings

from jobs.runs.history.queries.query_parameters import TableQuery
from jobs.runs.history.queries.schemas import StoredAttempt, TableRows
from jobs.runs.history.store.folder import HistoryFolder, HistoryManifest, NoHistoryError, get_num_bytes
from jobs.runs.history.store.query import HistoryTables, query_history, query_to_file
from jobs.runs.history.store.schema import GAUGES
from planner.facts.validation import Problem, SpecError

CONTROL_CODES = (*range(0x20), *range(0x7F, 0xA0))
FORMULA_STARTS = "'=', '+', '-', '@', ''''"


def format_as_cells(sql: str, columns: Iterable[tuple[str, str]]) -> str:
    """Return SQL for the same rows as CSV cells that terminals and spreadsheets do not execute.

    Lists and maps are JSON. In text, a backslash and control characters are escaped as in JSON (`\\\\`, `\\u001b`).
    Text that begins with = + - @ or an apostrophe gets an apostrophe before it.

    Args:
        columns: Each column with the name of its DuckDB type.
    """
    selected = ", ".join(f"{_make_cell(name, kind)} AS {name}" for name, kind in columns)
    return f"SELECT {selected} FROM ({sql})"


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
    "steps": "time",
    "traffic": "second",
    "gauges": "time",
    "marks": "time",
    "logs": "time",
    "calls": "issued",
    "spans": "began",
}
SORT_ORDERS = {
    "calls": "issued, rank",
    "spans": "began, rank",
    "traffic": "second, rank, axis, op",
    "logs": "time, rank, first",
}
_COUNTERS = ("calls", "completed", "payload_bytes", "algorithmic_bytes")
_STEP_CURVES = ("step_s", "loss", "grad_norm", "learning_rate", "data_s", "optimizer_s")
_GAUGES = [name for name in GAUGES.names if name not in ("rank", "node", "host", "time")]
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
    numbers = sorted(int(path.name) for path in (root / job).glob("*") if path.name.isascii() and path.name.isdigit())
    stored = []
    for number in numbers:
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
    """Return rows or bins of a table.

    Raises:
        SpecError: The answer has too many rows.
        NoHistoryError, BusyError: As `query_history`.
    """
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
    """Return all rows as a file that is deleted once it is closed.

    Raises:
        NoHistoryError, BusyError: As `query_history`.
    """
    return query_to_file(job, attempt, lambda tables, path: _write_file(tables, table, parameters, path))


def _write_file(tables: HistoryTables, table: str, parameters: TableQuery, path: Path) -> None:
    query = _make_query(tables, table, parameters)
    sql, values = query.sql, query.values
    if parameters.format == "csv":
        sql = format_as_cells(sql, tables.describe_columns(sql, *values))
    tables.copy_to_file(sql, values, path, COPY_OPTIONS[parameters.format])


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
    """Return SQL for curves of steps. A merged row covers `over` steps, and names the last one."""
    ends = [
        f"min({name})::DOUBLE AS {name}_min, {_make_weighted_mean(name)} AS {name}_mean, "
        f"max({name})::DOUBLE AS {name}_max"
        for name in _STEP_CURVES
    ]
    steps = "list_sum([row.over for row in list(DISTINCT {'step': step, 'over': over})])::BIGINT"
    counted = f"min(step - over + 1) AS first_step, max(step) AS last_step, {steps} AS steps, count(*) AS rows"
    return f"{counted}, {', '.join(ends)}"


def _make_weighted_mean(name: str) -> str:
    return f"sum({name} * over) / sum(over) FILTER ({name} IS NOT NULL)"


_BIN_COLUMNS: dict[str, str] = {
    "traffic": ", ".join(f"try_cast(sum({name}) AS BIGINT) AS {name}" for name in _COUNTERS)
    + ", sum(busy_s) AS busy_s",
    "steps": _make_step_columns(),
    "gauges": ", ".join(f"avg({name}) AS {name}_mean, max({name}) AS {name}_max" for name in _GAUGES),
}


def get_file_name(job: str, attempt: int, table: str, how: str) -> str:
    return f"{job}-{attempt}-{table}.{how}"
