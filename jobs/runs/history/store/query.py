"""Questions to the files of a history, answered by DuckDB: one engine a process, bounded in memory and at once."""

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
from typing import Any, BinaryIO, TypeVar

import duckdb
from django.conf import settings

from jobs.core.errors import WORDS, is_full
from jobs.planning.planners import BusyError
from jobs.runs.history.store.folder import Folder, GoneError, Manifest
from jobs.runs.history.store.tables import TABLES

AT_ONCE = 3
PATIENCE_S = 5.0
THREADS = 2
MEMORY_LIMIT = "512MB"
SPILL_LIMIT = "1GB"
TRIES = 4  # while its recorder replaces files under us

Answer = TypeVar("Answer")

_room = threading.BoundedSemaphore(AT_ONCE)


class Tables:
    """The tables of one attempt at one moment, as views of their names."""

    def __init__(self, cursor: duckdb.DuckDBPyConnection, folder: Folder, manifest: Manifest) -> None:
        self.manifest, self._folder, self._cursor = manifest, folder, cursor
        for table, schema in TABLES.items():
            if files := folder.files(manifest, table):
                listed = ", ".join(_quoted(file) for file in files)
                cursor.execute(f"CREATE OR REPLACE TEMP VIEW {table} AS SELECT * FROM read_parquet([{listed}])")
            else:
                cursor.register(table, schema.empty_table())

    @property
    def state(self) -> Any:
        """What the streams add up to (`kept.state.State`)."""
        return self._folder.state(self.manifest)

    def rows(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = self._cursor.execute(sql, list(values)).fetchall()
        return found

    def columns(self, sql: str, *values: object) -> dict[str, list[Any]]:
        """By name; numbers of 32 bits as few digits as they have."""
        done = self._cursor.execute(sql, list(values))
        names = [(told[0], str(told[1])) for told in done.description or ()]
        found = done.fetchall()
        columns = zip(*found, strict=True) if found else ((),) * len(names)
        return {name: _singles(kind, column) for (name, kind), column in zip(names, columns, strict=True)}

    def types(self, sql: str, *values: object) -> list[tuple[str, str]]:
        """Its columns, each with the name of its type."""
        return [(name, kind) for name, kind, *_ in self._cursor.execute(f"DESCRIBE {sql}", values).fetchall()]

    def write(self, sql: str, values: list[object], path: Path, how: str) -> None:
        """Into a file; `how` as DuckDB's COPY has it."""
        self._cursor.execute(f"COPY ({sql}) TO {_quoted(str(path))} ({how})", values)


def ask(job: str, attempt: int, work: Callable[[Tables], Answer]) -> Answer:
    """What `work` finds in a history.

    Raises:
        GoneError: there is none.
        BusyError: too much is asked at once.
        OSError: the disk is full.
    """
    folder = Folder(settings.HISTORY_DIR, job, attempt)
    for tried in range(TRIES):
        try:
            with _cursor() as cursor:
                return work(Tables(cursor, folder, folder.manifest()))
        except duckdb.OutOfMemoryException:  # also of a disk that takes no more of what does not fit in memory
            raise BusyError("The query needs more memory than is available. Request less data, or try again.") from None
        except (duckdb.IOException, duckdb.InvalidInputException, GoneError) as error:
            if is_full(error):
                raise OSError(errno.ENOSPC, WORDS) from error
            # Its files were replaced by others with the same rows, unless it is gone altogether.
            folder.manifest()
            if tried == TRIES - 1:
                raise
    raise AssertionError("unreachable")


def filed(job: str, attempt: int, write: Callable[[Tables, Path], None]) -> BinaryIO:
    """What `write` finds in a history, as a file that is gone once it is closed.

    Raises:
        GoneError, BusyError, OSError
    """
    spill = spill_folder()
    spill.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=spill)
    os.close(handle)
    path = Path(name)
    try:
        ask(job, attempt, lambda tables: write(tables, path))
        return path.open("rb")
    finally:
        path.unlink(missing_ok=True)


def spill_folder() -> Path:
    """Where what does not fit in memory lies for as long as somebody reads it."""
    root: Path = settings.HISTORY_DIR
    return root / "spill"


def short(value: float) -> float:
    """Of a mean: as many digits as the numbers of 32 bits have that it is of."""
    return float(f"{value:.7g}")


def single(value: float) -> float:
    """As few digits as no other number of 32 bits has: what a CSV file says of the same row, and Parquet keeps."""
    kept = struct.pack("f", value)
    numbers = (float(f"{value:.{digits}g}") for digits in (7, 8))
    return next((number for number in numbers if struct.pack("f", number) == kept), float(f"{value:.9g}"))


def _singles(kind: str, column: Any) -> list[Any]:
    if kind == "FLOAT":
        return [None if value is None else single(value) for value in column]
    if kind.startswith("MAP"):
        return [value and {name: single(of) for name, of in value.items()} for value in column]
    return list(column)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


@contextlib.contextmanager
def _cursor() -> Iterator[duckdb.DuckDBPyConnection]:
    if not _room.acquire(timeout=PATIENCE_S):
        raise BusyError("Too many queries are running. Try again in a few seconds.")
    try:
        with engine().cursor() as cursor:
            yield cursor
    finally:
        _room.release()


@cache
def engine() -> duckdb.DuckDBPyConnection:
    """It reads the files it is told of and nothing else: no extension is fetched, nothing written beside its spill."""
    return duckdb.connect(
        ":memory:",
        config={
            "threads": THREADS,
            "memory_limit": MEMORY_LIMIT,
            "temp_directory": str(spill_folder()),
            "max_temp_directory_size": SPILL_LIMIT,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "python_enable_replacements": False,
        },
    )
