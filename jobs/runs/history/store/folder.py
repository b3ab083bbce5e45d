"""An attempt's history on disk: Parquet files, and a manifest that says which of them count and up to where they go.

A commit writes new files, then the manifest by rename, with each node's position in its stream. Whatever kills the
writer, the manifest and the files it names are of one moment; what it does not name was never told and goes.
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

from jobs.runs.history.store.tables import TABLES

VERSION = 1
MANIFEST = "meta.json"
FAN = 8  # files of one level that become one of the next
COMPRESSION = "zstd"
GROUP_ROWS = 2**17


class Part(TypedDict):
    """One file of a table. `level`: how often what is in it was written again."""

    file: str
    rows: int
    bytes: int
    level: int


class Node(TypedDict):
    """A member's stream: the id of the last entry that is in the files, its number and its time."""

    after: str
    number: int | None
    time: float | None
    host: NotRequired[str]


class Manifest(TypedDict):
    """Everything that counts of a folder."""

    v: int
    job: str
    attempt: int
    generation: int  # one more with each commit: a writer that knows an older one has been overtaken
    ended: float | None  # when the attempt had, and nothing comes any more
    nodes: dict[str, Node]
    state: str | None  # the file with what the streams add up to
    parts: dict[str, list[Part]]
    first: float | None  # times that rows tell of
    last: float | None
    merged_s: int  # seconds that one row of the oldest traffic covers; 1: nothing was merged
    raw_dropped: int  # steps whose calls and spans had to go


class OvertakenError(Exception):
    """Another recorder wrote here, or writes now: what this one knows is old."""


class GoneError(Exception):
    """There is no such history: never recorded, or forgotten."""


def empty(job: str, attempt: int) -> Manifest:
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


class Folder:
    """The files of one attempt."""

    def __init__(self, root: Path, job: str, attempt: int) -> None:
        self.path = root / job / str(attempt)
        self._job, self._attempt = job, attempt

    def manifest(self) -> Manifest:
        """As it was last committed.

        Raises:
            GoneError
        """
        try:
            found: Manifest = json.loads((self.path / MANIFEST).read_bytes())
        except FileNotFoundError:
            raise GoneError(f"There is no history of job {self._job}, attempt {self._attempt}.") from None
        if found["v"] != VERSION:
            raise GoneError(f"The history has format {found['v']}. This version of Meshboard reads format {VERSION}.")
        return found

    def open(self) -> Manifest:
        """For its writer: made where there is none, and without what a killed one left."""
        with self.alone():
            try:
                found = self.manifest()
            except GoneError:
                found = empty(self._job, self._attempt)
            self._remove_others(found)
        return found

    def state(self, manifest: Manifest) -> Any:
        """What was committed beside the tables, None where nothing was."""
        if manifest["state"] is None:
            return None
        try:
            return msgpack.unpackb((self.path / manifest["state"]).read_bytes(), strict_map_key=False)
        except FileNotFoundError:
            raise GoneError(f"{manifest['state']} was replaced") from None

    def files(self, manifest: Manifest, table: str) -> list[str]:
        """Paths of a table's files, oldest first."""
        return [str(self.path / part["file"]) for part in manifest["parts"].get(table, [])]

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else writes here meanwhile.

        Raises:
            OvertakenError: somebody does.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.path / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise OvertakenError(f"Another process writes {self.path}.") from None
            yield

    def commit(self, manifest: Manifest, tables: dict[str, pa.Table], state: object) -> None:
        """Add rows, and all that the manifest says beside its parts; it is the newer one then.

        Raises:
            OvertakenError: nothing was written that counts.
        """
        with self.alone():
            self._still(manifest)
            generation = manifest["generation"] + 1
            parts = {table: list(found) for table, found in manifest["parts"].items()}
            for table, rows in tables.items():
                parts.setdefault(table, []).append(self._write(table, rows, generation))
            name = f"state-{generation:08d}.msgpack"
            _put(self.path / name, msgpack.packb(state))
            before = manifest["state"]
            manifest["generation"], manifest["parts"], manifest["state"] = generation, parts, name
            self._tell(manifest)
            if before is not None:
                (self.path / before).unlink(missing_ok=True)

    def replace(self, manifest: Manifest, table: str, old: list[Part], new: list[Part]) -> None:
        """Some files of a table are others from now on: the same rows written again, or fewer.

        `new` are already written, by `rewritten`. Readers that opened an old one go on.

        Raises:
            OvertakenError: nothing was changed.
        """
        with self.alone():
            self._still(manifest)
            gone = {part["file"] for part in old}
            kept = [part for part in manifest["parts"][table] if part["file"] not in gone]
            place = next(i for i, part in enumerate(manifest["parts"][table]) if part["file"] in gone)
            manifest["parts"][table] = [*kept[:place], *new, *kept[place:]]
            manifest["generation"] += 1
            self._tell(manifest)
            for name in gone:
                (self.path / name).unlink(missing_ok=True)

    def compact(self, manifest: Manifest) -> None:
        """One file a table: the attempt has ended."""
        for table, parts in list(manifest["parts"].items()):
            if len(parts) > 1:
                self.replace(manifest, table, parts, [self._joined(manifest, table, parts)])

    def merge_levels(self, manifest: Manifest) -> None:
        """FAN files of one level become one of the next, so that a long run has few."""
        for table, found in list(manifest["parts"].items()):
            level = 0
            while level <= max((part["level"] for part in found), default=-1):
                parts = [part for part in found if part["level"] == level]
                if len(parts) >= FAN:
                    self.replace(manifest, table, parts, [self._joined(manifest, table, parts)])
                    found = manifest["parts"][table]
                level += 1

    def forget(self) -> None:
        """Remove everything; the job's folder too where this was its last attempt."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()

    def rewritten(self, manifest: Manifest, table: str, batches: Iterator[pa.RecordBatch]) -> Part:
        """A file of these rows for `replace`: memory holds one group of them at a time."""
        own = secrets.token_hex(4)  # another recorder may write that generation meanwhile
        name, schema = f"{table}-{manifest['generation'] + 1:08d}-{own}.parquet", TABLES[table]
        with (
            _synced(self.path / name) as draft,
            pq.ParquetWriter(draft, schema, compression=COMPRESSION) as writer,
        ):
            waiting: list[pa.RecordBatch] = []
            rows = 0
            for batch in batches:
                waiting.append(batch)
                rows += batch.num_rows
                if sum(b.num_rows for b in waiting) >= GROUP_ROWS:
                    writer.write_table(pa.Table.from_batches(waiting, schema))
                    waiting = []
            if waiting:
                writer.write_table(pa.Table.from_batches(waiting, schema))
        level = max((part["level"] for part in manifest["parts"].get(table, [])), default=0)
        return self._part(name, rows, level)

    def batches(self, parts: list[Part]) -> Iterator[pa.RecordBatch]:
        """Rows of some files, in order."""
        for part in parts:
            with pq.ParquetFile(self.path / part["file"]) as file:
                yield from file.iter_batches(batch_size=GROUP_ROWS)

    def _joined(self, manifest: Manifest, table: str, parts: list[Part]) -> Part:
        joined = self.rewritten(manifest, table, self.batches(parts))
        return {**joined, "level": 1 + max(part["level"] for part in parts)}

    def _part(self, name: str, rows: int, level: int) -> Part:
        return {"file": name, "rows": rows, "bytes": (self.path / name).stat().st_size, "level": level}

    def _write(self, table: str, rows: pa.Table, generation: int) -> Part:
        name = f"{table}-{generation:08d}.parquet"
        with _synced(self.path / name) as draft:
            pq.write_table(rows, draft, compression=COMPRESSION, row_group_size=GROUP_ROWS)
        return self._part(name, rows.num_rows, 0)

    def _still(self, manifest: Manifest) -> None:
        try:
            generation = self.manifest()["generation"]
        except GoneError:
            generation = 0
        if generation != manifest["generation"]:
            raise OvertakenError(
                f"Another recorder changed {self.path}: generation {generation} instead of {manifest['generation']}."
            )

    def _tell(self, manifest: Manifest) -> None:
        _put(self.path / MANIFEST, json.dumps(manifest).encode())

    def _remove_others(self, manifest: Manifest) -> None:
        named = {part["file"] for parts in manifest["parts"].values() for part in parts}
        for path in self.path.iterdir():
            if path.name not in named | {MANIFEST, "lock", manifest["state"]}:
                path.unlink(missing_ok=True)


def num_bytes(manifest: Manifest, tables: tuple[str, ...] = tuple(TABLES)) -> int:
    """What the files of these tables take."""
    return sum(part["bytes"] for table in tables for part in manifest["parts"].get(table, []))


def histories(root: Path) -> Iterator[tuple[str, int]]:
    """(job, attempt) of every history there is."""
    if not root.is_dir():
        return
    for path in sorted(root.glob("*/*")):
        if path.is_dir() and path.name.isascii() and path.name.isdigit():
            yield path.parent.name, int(path.name)


@contextlib.contextmanager
def _synced(path: Path) -> Iterator[Path]:
    """A file that is on the disk when it is there at all."""
    yield path
    with path.open("rb") as written:
        os.fsync(written.fileno())


def _put(path: Path, content: bytes) -> None:
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
