"""Store the history of an attempt as Parquet files, with a manifest that names the valid files and stream positions.

A commit writes new files and then renames the manifest, so a killed writer leaves a consistent history. Files that the
manifest does not name are deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NotRequired

import msgpack
import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import TypedDict

from jobs.runs.history.store.schema import TABLES

VERSION = 1
MANIFEST = "meta.json"
FILES_PER_LEVEL = 8  # files of one level that are merged into one of the next
COMPRESSION = "zstd"
ROWS_PER_GROUP = 2**17


class TableFile(TypedDict):
    """Describe a file of a table. `level`: how often its rows were merged."""

    file: str
    rows: int
    bytes: int
    level: int


class RecordedPosition(TypedDict):
    """Hold the last entry of a node's stream that is in the files: its id, its number, and its time."""

    after: str
    number: int | None
    time: float | None
    host: NotRequired[str]


class HistoryManifest(TypedDict):
    """Describe all valid files of a folder."""

    v: int
    job: str
    attempt: int
    generation: int  # of the commit: a writer with an older one is outdated
    ended: float | None  # when the attempt ended
    nodes: dict[str, RecordedPosition]
    state: str | None  # the file of the HistoryState
    parts: dict[str, list[TableFile]]
    first: float | None  # times of rows
    last: float | None
    merged_s: int  # seconds per row of the oldest traffic, 1 if no rows were merged
    raw_dropped: int  # traced steps that were deleted


class ConcurrentWriterError(Exception):
    """Another process writes this history or has changed it."""


class NoHistoryError(Exception):
    """The history does not exist or was deleted."""


def make_empty_manifest(job: str, attempt: int) -> HistoryManifest:
    return {
        "v": VERSION,
        "job": job,
        "attempt": attempt,
        "generation": 0,
        "ended": None,
        "nodes": {},
        "state": None,
        "parts": {},
        "first": None,
        "last": None,
        "merged_s": 1,
        "raw_dropped": 0,
    }


class HistoryFolder:
    """Read and write the files of one attempt."""

    def __init__(self, root: Path, job: str, attempt: int) -> None:
        self.path = root / job / str(attempt)
        self._job, self._attempt = job, attempt

    def read_manifest(self) -> HistoryManifest:
        """Return the manifest of the last commit. Raise NoHistoryError."""
        try:
            manifest: HistoryManifest = json.loads((self.path / MANIFEST).read_bytes())
        except FileNotFoundError:
            raise NoHistoryError(f"There is no history of job {self._job}, attempt {self._attempt}.") from None
        if manifest["v"] != VERSION:
            raise NoHistoryError(
                f"The history has format {manifest['v']}. This version of Meshboard reads format {VERSION}."
            )
        return manifest

    def open_for_writing(self) -> HistoryManifest:
        """Return the manifest for writing, and delete the leftovers of a killed writer."""
        with self.lock():
            try:
                manifest = self.read_manifest()
            except NoHistoryError:
                manifest = make_empty_manifest(self._job, self._attempt)
            files = {part["file"] for parts in manifest["parts"].values() for part in parts}
            for path in self.path.iterdir():
                if path.name not in files | {MANIFEST, "lock", manifest["state"]}:
                    path.unlink(missing_ok=True)
        return manifest

    def read_state(self, manifest: HistoryManifest) -> Any:
        """Return the committed state, None before the first commit."""
        if manifest["state"] is None:
            return None
        try:
            return msgpack.unpackb((self.path / manifest["state"]).read_bytes(), strict_map_key=False)
        except FileNotFoundError:
            raise NoHistoryError(f"{manifest['state']} was replaced") from None

    def get_paths(self, manifest: HistoryManifest, table: str) -> list[str]:
        """Return the paths of a table's files, oldest first."""
        return [str(self.path / part["file"]) for part in manifest["parts"].get(table, [])]

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock of the folder. Raise ConcurrentWriterError if another process holds it."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.path / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConcurrentWriterError(f"Another process writes {self.path}.") from None
            yield

    def commit(self, manifest: HistoryManifest, tables: dict[str, pa.Table], state: object) -> None:
        """Write rows and state, and update the manifest. After ConcurrentWriterError, the history is unchanged."""
        with self.lock():
            self._check_generation(manifest)
            generation = manifest["generation"] + 1
            parts = {table: list(files) for table, files in manifest["parts"].items()}
            for table, rows in tables.items():
                file_name = f"{table}-{generation:08d}.parquet"
                with _flush_after(self.path / file_name) as draft:
                    pq.write_table(rows, draft, compression=COMPRESSION, row_group_size=ROWS_PER_GROUP)
                parts.setdefault(table, []).append(self._make_part(file_name, rows.num_rows, 0))
            name = f"state-{generation:08d}.msgpack"
            _write_atomically(self.path / name, msgpack.packb(state))
            old_state = manifest["state"]
            manifest["generation"], manifest["parts"], manifest["state"] = generation, parts, name
            self._write_manifest(manifest)
            if old_state is not None:
                (self.path / old_state).unlink(missing_ok=True)

    def replace_files(self, manifest: HistoryManifest, table: str, old: list[TableFile], new: list[TableFile]) -> None:
        """Replace files of a table by the files `new`, which `write_file` wrote. Readers of old files continue."""
        with self.lock():
            self._check_generation(manifest)
            old_names = {part["file"] for part in old}
            remaining = [part for part in manifest["parts"][table] if part["file"] not in old_names]
            index = next(i for i, part in enumerate(manifest["parts"][table]) if part["file"] in old_names)
            manifest["parts"][table] = [*remaining[:index], *new, *remaining[index:]]
            manifest["generation"] += 1
            self._write_manifest(manifest)
            for name in old_names:
                (self.path / name).unlink(missing_ok=True)

    def compact(self, manifest: HistoryManifest) -> None:
        """Merge each table into one file after the end of the attempt."""
        for table, parts in list(manifest["parts"].items()):
            if len(parts) > 1:
                self.replace_files(manifest, table, parts, [self._merge_files(manifest, table, parts)])

    def merge_levels(self, manifest: HistoryManifest) -> None:
        """Merge FILES_PER_LEVEL files of a level into one of the next, which bounds the number of files."""
        for table, files in list(manifest["parts"].items()):
            level = 0
            while level <= max((part["level"] for part in files), default=-1):
                parts = [part for part in files if part["level"] == level]
                if len(parts) >= FILES_PER_LEVEL:
                    self.replace_files(manifest, table, parts, [self._merge_files(manifest, table, parts)])
                    files = manifest["parts"][table]
                level += 1

    def delete(self) -> None:
        """Delete the history, and the job's folder if it is empty then."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()

    def write_file(self, manifest: HistoryManifest, table: str, batches: Iterator[pa.RecordBatch]) -> TableFile:
        """Write rows to a file for `replace_files`, one row group in memory at a time."""
        suffix = secrets.token_hex(4)  # another recorder may write the same generation
        name, schema = f"{table}-{manifest['generation'] + 1:08d}-{suffix}.parquet", TABLES[table]
        with (
            _flush_after(self.path / name) as draft,
            pq.ParquetWriter(draft, schema, compression=COMPRESSION) as writer,
        ):
            buffered: list[pa.RecordBatch] = []
            rows = 0
            for batch in batches:
                buffered.append(batch)
                rows += batch.num_rows
                if sum(b.num_rows for b in buffered) >= ROWS_PER_GROUP:
                    writer.write_table(pa.Table.from_batches(buffered, schema))
                    buffered = []
            if buffered:
                writer.write_table(pa.Table.from_batches(buffered, schema))
        level = max((part["level"] for part in manifest["parts"].get(table, [])), default=0)
        return self._make_part(name, rows, level)

    def read_batches(self, table: str, parts: list[TableFile]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a table's files in order."""
        for part in parts:
            with pq.ParquetFile(self.path / part["file"]) as file:
                for batch in file.iter_batches(batch_size=ROWS_PER_GROUP):
                    yield _add_missing_columns(batch, TABLES[table])

    def _merge_files(self, manifest: HistoryManifest, table: str, parts: list[TableFile]) -> TableFile:
        joined = self.write_file(manifest, table, self.read_batches(table, parts))
        return {**joined, "level": 1 + max(part["level"] for part in parts)}

    def _make_part(self, name: str, rows: int, level: int) -> TableFile:
        return {"file": name, "rows": rows, "bytes": (self.path / name).stat().st_size, "level": level}

    def _check_generation(self, manifest: HistoryManifest) -> None:
        try:
            generation = self.read_manifest()["generation"]
        except NoHistoryError:
            generation = 0
        if generation != manifest["generation"]:
            raise ConcurrentWriterError(
                f"Another recorder changed {self.path}: generation {generation} instead of {manifest['generation']}."
            )

    def _write_manifest(self, manifest: HistoryManifest) -> None:
        _write_atomically(self.path / MANIFEST, json.dumps(manifest).encode())


def get_num_bytes(manifest: HistoryManifest, tables: tuple[str, ...] = tuple(TABLES)) -> int:
    """Return the bytes of the files of tables."""
    return sum(part["bytes"] for table in tables for part in manifest["parts"].get(table, []))


def iterate_histories(root: Path) -> Iterator[tuple[str, int]]:
    """Yield (job, attempt) of every history."""
    if not root.is_dir():
        return
    for path in sorted(root.glob("*/*")):
        if path.is_dir() and path.name.isascii() and path.name.isdigit():
            yield path.parent.name, int(path.name)


def _add_missing_columns(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Add the columns that the file of an older version does not have, as nulls."""
    if batch.schema.names == schema.names:
        return batch
    stored = set(batch.schema.names)
    columns = [
        batch.column(field.name) if field.name in stored else pa.nulls(batch.num_rows, field.type) for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


@contextlib.contextmanager
def _flush_after(path: Path) -> Iterator[Path]:
    """Flush the file at a path to disk after the block."""
    yield path
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _write_atomically(path: Path, content: bytes) -> None:
    draft = path.with_name(path.name + ".new")
    with draft.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    draft.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
