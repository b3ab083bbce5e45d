"""What is answered of an attempt's tables: what there is, rows or bins of one as JSON, or as a file to keep."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, NamedTuple

from django.conf import settings

from jobs.runs.history.queries.asked import Asked
from jobs.runs.history.queries.cells import as_cells
from jobs.runs.history.queries.shapes import AttemptKept, Rows
from jobs.runs.history.store.folder import Folder, GoneError, Manifest, num_bytes
from jobs.runs.history.store.query import Tables, ask, filed
from jobs.runs.history.store.tables import GAUGES
from planner.facts.validation import Problem, SpecError

MOST_ROWS = 100_000  # of an answer in JSON; files have no bound but the table's
TIMES = {
    "steps": "time",
    "traffic": "second",
    "gauges": "time",
    "marks": "time",
    "logs": "time",
    "calls": "issued",
    "spans": "began",
}
ORDER = {
    "calls": "issued, rank",
    "spans": "began, rank",
    "traffic": "second, rank, axis, op",
    "logs": "time, rank, first",
}
_SUMMED = ("calls", "completed", "payload_bytes", "algorithmic_bytes")
_CURVES = ("step_s", "loss", "grad_norm", "learning_rate", "data_s", "optimizer_s")
_GAUGES = [name for name in GAUGES.names if name not in ("rank", "node", "host", "time")]
COPY = {"csv": "FORMAT csv, HEADER", "parquet": "FORMAT parquet, COMPRESSION zstd"}


class Question(NamedTuple):
    """SQL and what its `?` stand for. Names in it are ours alone; what was asked is among the values."""

    sql: str
    values: list[object]
    since: float | None = None
    until: float | None = None
    width_s: float | None = None


def index(job: str) -> list[AttemptKept]:
    """What there is of a job, oldest attempt first."""
    root: Path = settings.HISTORY_DIR
    numbers = sorted(int(path.name) for path in (root / job).glob("*") if path.name.isascii() and path.name.isdigit())
    found = []
    for number in numbers:
        try:
            found.append(_kept(Folder(root, job, number).manifest()))
        except GoneError:
            continue
    return found


def _kept(manifest: Manifest) -> AttemptKept:
    return {
        "attempt": manifest["attempt"],
        "ended": manifest["ended"] is not None,
        "from": manifest["first"],
        "to": manifest["last"],
        "bytes": num_bytes(manifest),
        "tables": {
            table: {"rows": sum(part["rows"] for part in parts), "bytes": num_bytes(manifest, (table,))}
            for table, parts in manifest["parts"].items()
        },
        "merged_s": manifest["merged_s"],
        "raw_dropped": manifest["raw_dropped"],
    }


def rows(job: str, attempt: int, table: str, asked: Asked) -> Rows:
    """Raises SpecError where they are too many, GoneError, BusyError."""
    return ask(job, attempt, lambda tables: _rows(tables, table, asked))


def _rows(tables: Tables, table: str, asked: Asked) -> Rows:
    question = _question(tables, table, asked)
    columns = tables.columns(f"{question.sql} LIMIT {MOST_ROWS + 1}", *question.values)
    count = len(next(iter(columns.values())))
    if count > MOST_ROWS:
        [(all_rows,)] = tables.rows(f"SELECT count(*) FROM ({question.sql})", *question.values)
        words = (
            f"The answer has {all_rows:,} rows, but the maximum for JSON is {MOST_ROWS:,}. "
            "Use bins, fewer ranks, a shorter time range, or format csv or parquet."
        )
        raise SpecError([Problem("format", words)])
    return {
        "table": table,
        "attempt": tables.manifest["attempt"],
        "from": question.since,
        "to": question.until,
        "width_s": question.width_s,
        "columns": columns,
    }


def file(job: str, attempt: int, table: str, asked: Asked) -> BinaryIO:
    """The same rows, all of them, as a file that is gone once it is closed.

    Raises:
        GoneError, BusyError
    """
    return filed(job, attempt, lambda tables, path: _write(tables, table, asked, path))


def _write(tables: Tables, table: str, asked: Asked, path: Path) -> None:
    question = _question(tables, table, asked)
    sql, values = question.sql, question.values
    if asked.format == "csv":
        sql = as_cells(sql, tables.types(sql, *values))
    tables.write(sql, values, path, COPY[asked.format])


def _question(tables: Tables, table: str, asked: Asked) -> Question:
    where, values = _where(table, asked)
    if asked.bins is None:
        sql = f"SELECT * FROM {table} WHERE {where} ORDER BY {ORDER.get(table, f'{TIMES[table]}, rank')}"
        return Question(sql, values, asked.since, asked.until)
    since = asked.since if asked.since is not None else tables.manifest["first"] or 0.0
    until = asked.until if asked.until is not None else tables.manifest["last"] or since
    width = max((until - since) / asked.bins, _narrowest(tables.manifest, since))
    last = asked.bins - 1
    place = f"least(greatest(floor(({TIMES[table]} - ?) / ?), 0), ?)::BIGINT"
    by = "".join(f", {name}" for name in asked.by)
    told = f"? + ? * bin AS time{by}, {_BINNED[table]}"
    inner = f"SELECT *, {place} AS bin FROM {table} WHERE {where}"
    sql = f"SELECT {told} FROM ({inner}) GROUP BY bin{by} ORDER BY bin{by}"
    return Question(sql, [since, width, since, width, last, *values], since, until, width)


def _narrowest(manifest: Manifest, since: float) -> float:
    """Seconds of a bin. Where rows behind `since` may be merged ones, bins between them would tell of a standstill."""
    first, last, merged_s = manifest["first"], manifest["last"], manifest["merged_s"]
    if first is None or last is None or merged_s == 1 or since >= last - (last - first) / merged_s:
        return 1e-6
    return float(merged_s)


def _where(table: str, asked: Asked) -> tuple[str, list[object]]:
    terms, values = ["true"], list[object]()
    if asked.since is not None:
        terms.append(f"{TIMES[table]} >= ?")
        values.append(asked.since)
    if asked.until is not None:
        terms.append(f"{TIMES[table]} <= ?")
        values.append(asked.until)
    for column, ranges in (("rank", asked.ranks), ("step", asked.steps)):
        if ranges is not None:
            terms.append("(" + " OR ".join([f"{column} BETWEEN ? AND ?"] * len(ranges)) + ")")
            values += [end for ends in ranges for end in ends]
    return " AND ".join(terms), values


def _curves() -> str:
    """A merged row stands for `over` steps, the last of which it names."""
    ends = [
        f"min({name})::DOUBLE AS {name}_min, {_mean(name)} AS {name}_mean, max({name})::DOUBLE AS {name}_max"
        for name in _CURVES
    ]
    steps = "list_sum([row.over for row in list(DISTINCT {'step': step, 'over': over})])::BIGINT"
    counted = f"min(step - over + 1) AS first_step, max(step) AS last_step, {steps} AS steps, count(*) AS rows"
    return f"{counted}, {', '.join(ends)}"


def _mean(name: str) -> str:
    return f"sum({name} * over) / sum(over) FILTER ({name} IS NOT NULL)"


_BINNED: dict[str, str] = {
    "traffic": ", ".join(f"try_cast(sum({name}) AS BIGINT) AS {name}" for name in _SUMMED) + ", sum(busy_s) AS busy_s",
    "steps": _curves(),
    "gauges": ", ".join(f"avg({name}) AS {name}_mean, max({name}) AS {name}_max" for name in _GAUGES),
}


def file_name(job: str, attempt: int, table: str, how: str) -> str:
    return f"{job}-{attempt}-{table}.{how}"
