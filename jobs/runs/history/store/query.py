"""Query stored histories with DuckDB: one engine per process, with bounded memory and concurrency."""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import duckdb
from django.conf import settings

from jobs.core.errors import DISK_FULL_MESSAGE, is_disk_full
from jobs.planning.planner_processes import BusyError
from jobs.runs.history.store.folder import HistoryFolder, HistoryManifest, NoHistoryError
from jobs.runs.history.store.schema import TABLES

MAX_CONCURRENT_QUERIES = 3
QUERY_SLOT_TIMEOUT_S = 5.0
THREADS = 2
MEMORY_LIMIT = "512MB"
SPILL_LIMIT = "1GB"
MAX_TRIES = 4  # while the recorder replaces files

Answer = TypeVar("Answer")
Columns = dict[str, list[Any]]  # of equal length

GROWN_TABLES = {"steps"}  # files of older versions have fewer columns

_query_slots = threading.BoundedSemaphore(MAX_CONCURRENT_QUERIES)


class TrafficBins(NamedTuple):
    """Describe bins of seconds that cover the traffic of a run. The first has the number `start` since 1970."""

    width_s: int
    start: int
    length: int


class HistoryTables:
    """Provide the tables of one attempt at one moment, as views of the same names."""

    def __init__(self, cursor: duckdb.DuckDBPyConnection, folder: HistoryFolder, manifest: HistoryManifest) -> None:
        self.manifest, self._folder, self._open_cursor = manifest, folder, cursor
        for table, schema in TABLES.items():
            if files := folder.get_paths(manifest, table):
                listed = ", ".join(_quote(file) for file in files)
                select = f"SELECT * FROM read_parquet([{listed}])"
                if table in GROWN_TABLES:
                    cursor.register(f"empty_{table}", schema.empty_table())
                    select = f"SELECT * FROM empty_{table} UNION ALL BY NAME"
                    select += f" SELECT * FROM read_parquet([{listed}], union_by_name=true)"
                cursor.execute(f"CREATE OR REPLACE TEMP VIEW {table} AS {select}")
            else:
                cursor.register(table, schema.empty_table())

    @property
    def state(self) -> Any:
        """Return the `HistoryState` of the streams."""
        return self._folder.read_state(self.manifest)

    def fetch_rows(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        return self._open_cursor.execute(sql, list(values)).fetchall()

    def fetch_columns(self, sql: str, *values: object) -> Columns:
        """Return columns by name. 32-bit floats get as few digits as needed."""
        result = self._open_cursor.execute(sql, list(values))
        names = [(column[0], str(column[1])) for column in result.description or ()]
        rows = result.fetchall()
        columns = zip(*rows, strict=True) if rows else ((),) * len(names)
        return {name: _round_column(kind, column) for (name, kind), column in zip(names, columns, strict=True)}

    def get_traffic_bins(self, max_bins: int) -> TrafficBins | None:
        """Return at most `max_bins` bins, at least as wide as merged rows, or None without traffic."""
        [(first, last)] = self.fetch_rows("SELECT min(second), max(second) FROM traffic")
        if first is None:
            return None
        width = self.manifest["merged_s"]
        while last // width - first // width >= max_bins:
            width *= 2
        return TrafficBins(width, first // width, last // width - first // width + 1)

    def copy_to_file(self, sql: str, values: list[object], path: Path, options: str) -> None:
        """Write the result of a query to a file. `options`: those of DuckDB's COPY."""
        self._open_cursor.execute(f"COPY ({sql}) TO {_quote(str(path))} ({options})", values)


def query_history(job: str, attempt: int, work: Callable[[HistoryTables], Answer]) -> Answer:
    """Return what `work` finds in a history.

    Raises:
        NoHistoryError: The history does not exist.
        BusyError: Too many queries run.
        OSError: The disk is full.
    """
    folder = HistoryFolder(settings.HISTORY_DIR, job, attempt)
    for attempt_number in range(MAX_TRIES):
        try:
            with _open_cursor() as cursor:
                return work(HistoryTables(cursor, folder, folder.read_manifest()))
        except duckdb.OutOfMemoryException:  # or the spill folder is full
            raise BusyError("The query needs more memory than is available. Request less data, or try again.") from None
        except (duckdb.IOException, duckdb.InvalidInputException, NoHistoryError) as error:
            if is_disk_full(error):
                raise OSError(errno.ENOSPC, DISK_FULL_MESSAGE) from error
            # The recorder replaced the files by others with the same rows, unless the history is gone.
            folder.read_manifest()
            if attempt_number == MAX_TRIES - 1:
                raise
    raise AssertionError("unreachable")


def query_to_file(job: str, attempt: int, write: Callable[[HistoryTables, Path], None]) -> BinaryIO:
    """Return what `write` finds in a history, as a file that is deleted once it is closed.

    Raises the errors of `query_history`.
    """
    spill = get_spill_folder()
    spill.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=spill)
    os.close(handle)
    path = Path(name)
    try:
        query_history(job, attempt, lambda tables: write(tables, path))
        return path.open("rb")
    finally:
        path.unlink(missing_ok=True)


def get_spill_folder() -> Path:
    """Return the folder of temporary data that does not fit in memory."""
    root: Path = settings.HISTORY_DIR
    return root / "spill"


def round_mean(value: float) -> float:
    """Round a mean of 32-bit floats to their digits."""
    return float(f"{value:.7g}")


def round_float32(value: float) -> float:
    """Round to the fewest digits that give the same 32-bit float, as in CSV files of the same row."""
    packed = struct.pack("f", value)
    candidates = (float(f"{value:.{digits}g}") for digits in (7, 8))
    return next((number for number in candidates if struct.pack("f", number) == packed), float(f"{value:.9g}"))


def _round_column(kind: str, column: Any) -> list[Any]:
    if kind == "FLOAT":
        return [None if value is None else round_float32(value) for value in column]
    if kind.startswith("MAP"):
        return [value and {name: round_float32(number) for name, number in value.items()} for value in column]
    return list(column)


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


@contextlib.contextmanager
def _open_cursor() -> Iterator[duckdb.DuckDBPyConnection]:
    if not _query_slots.acquire(timeout=QUERY_SLOT_TIMEOUT_S):
        raise BusyError("Too many queries are running. Try again in a few seconds.")
    try:
        with get_engine().cursor() as cursor:
            yield cursor
    finally:
        _query_slots.release()


@cache
def get_engine() -> duckdb.DuckDBPyConnection:
    """Return the engine, which installs no extension and writes only to its spill folder."""
    return duckdb.connect(
        ":memory:",
        config={
            "threads": THREADS,
            "memory_limit": MEMORY_LIMIT,
            "temp_directory": str(get_spill_folder()),
            "max_temp_directory_size": SPILL_LIMIT,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "python_enable_replacements": False,
        },
    )
