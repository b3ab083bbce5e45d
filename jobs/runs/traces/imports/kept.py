"""Imports on disk: files as they are sent part by part, then their events in the history's layout, as Parquet."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from django.conf import settings
from django.contrib.auth.models import User
from django.db import transaction
from django.utils import timezone

from jobs.core.errors import WORDS
from jobs.models import ImportedTrace
from jobs.planning.planners import BusyError
from jobs.runs.traces.imports.parts import ImportProblemError, Source
from jobs.runs.traces.imports.reading import Read, read, source
from jobs.runs.traces.shapes import Call, Span, Trace, of_tables, tables

log = logging.getLogger(__name__)

PART_BYTES = 512 * 2**10  # of a file, in one request
FILE_BYTES = 64 * 2**20
IMPORT_BYTES = 256 * 2**20
MOST_FILES = 64
MOST_IMPORTS = 20  # of a user
LASTS = timedelta(days=30)
UNFINISHED_LASTS = timedelta(hours=1)
READ_AT_ONCE = 2  # imports, in a web process: a file of some KB unpacks to what takes ten seconds
PATIENCE_S = 5.0  # for one's turn
CALLS = pa.schema(
    [
        *(pa.field(name, pa.int64()) for name in ("step", "rank")),
        pa.field("axis", pa.string()),
        pa.field("ranks", pa.list_(pa.int32())),
        *(pa.field(name, pa.int64()) for name in ("nth", "sequence")),
        pa.field("op", pa.string()),
        *(pa.field(name, pa.float64()) for name in ("issued", "blocked_s", "ended")),
        *(pa.field(name, pa.int64()) for name in ("payload_bytes", "peer")),
    ]
)
SPANS = pa.schema(
    [
        *(pa.field(name, pa.int64()) for name in ("step", "rank")),
        pa.field("work", pa.string()),
        *(pa.field(name, pa.int64()) for name in ("chunk", "micro_batch")),
        *(pa.field(name, pa.float64()) for name in ("began", "ended")),
    ]
)


_room = threading.BoundedSemaphore(READ_AT_ONCE)


class TooManyError(RuntimeError):
    """The user has as many imports as one may."""


class TakenError(RuntimeError):
    """It is being read, or deleted, by another request just now."""

    def __init__(self) -> None:
        super().__init__("Another request is reading this import, or has deleted it. Try again.")


def folder(made: ImportedTrace) -> Path:
    """Its own; nobody else's text is in the name."""
    assert re.fullmatch(r"[a-z2-7]{1,16}", made.id)
    return Path(settings.STATE_DIR) / "imports" / made.id


def begin(owner: Any, name: str, files: list[tuple[str, int]]) -> ImportedTrace:
    """A row that files can be sent to.

    Raises:
        TooManyError: MOST_IMPORTS are there.
    """
    forget_old()
    with transaction.atomic():
        User.objects.select_for_update(no_key=True).get(pk=owner.pk)  # of several at once each counts the one before
        if ImportedTrace.objects.filter(owner=owner).count() >= MOST_IMPORTS:
            raise TooManyError(f"You already have {MOST_IMPORTS} imports, the maximum. Delete an import first.")
        made = ImportedTrace.objects.create(owner=owner, name=name, files=files, size=sum(size for _, size in files))
        (folder(made) / "sent").mkdir(parents=True, mode=0o700)  # where there is no room for it, no row is left
    return made


def add(made: ImportedTrace, place: int, offset: int, part: bytes) -> int:
    """Append to a file; the bytes that it has now.

    Raises:
        ImportProblemError: it does not go on where the file ends, or beyond the size that was told.
        TakenError: nothing is taken any more.
        OSError: the disk is full; the file is as it was.
    """
    name, size = made.files[place]
    path = folder(made) / "sent" / str(place)
    try:
        opened = path.open("ab", buffering=0)
    except FileNotFoundError:
        raise TakenError from None
    with opened as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the same part may be sent again while it is written
        if file.seek(0, os.SEEK_END) != offset:
            raise ImportProblemError(
                name, "offset", f"`offset` is {offset}, but the file has {file.tell()} bytes so far. Use this number."
            )
        if offset + len(part) > size:
            raise ImportProblemError(
                name,
                "size",
                f"The file has {offset + len(part)} bytes, but its announced size is {size} bytes. Start a new import.",
            )
        if file.write(part) < len(part):  # what found room
            file.truncate(offset)
            raise OSError(errno.ENOSPC, WORDS)
    return offset + len(part)


def finish(made: ImportedTrace) -> None:
    """Read what was sent and keep its events; what was sent goes, and where it cannot be read the import with it.

    Raises:
        ImportProblemError: naming file and field.
        TakenError: another request does.
        BusyError: too many are read at once; nothing was changed.
    """
    if not _room.acquire(timeout=PATIENCE_S):
        raise BusyError(f"The board is already reading {READ_AT_ONCE} imports, the maximum. Try again later.")
    try:
        sent = folder(made) / "reading"
        try:
            (folder(made) / "sent").rename(sent)  # of several requests, in whatever process, one has it
        except OSError:
            raise TakenError from None
        try:
            _write(made, read([_sent(made, sent, place) for place in range(len(made.files))]))
        except ImportProblemError:
            delete(made)
            raise
        except FileNotFoundError:  # it was deleted under us
            if sent.exists():
                raise
            raise TakenError from None
        except TakenError:
            raise
        except BaseException:
            with contextlib.suppress(OSError):
                sent.rename(folder(made) / "sent")
            raise
        shutil.rmtree(sent, ignore_errors=True)
    finally:
        _room.release()


def _sent(made: ImportedTrace, sent: Path, place: int) -> Source:
    name, size = made.files[place]
    path = sent / str(place)
    there = path.stat().st_size if path.exists() else 0
    if there != size:
        raise ImportProblemError(
            name, "size", f"Only {there} of {size} bytes of the file arrived. Send the rest of the file."
        )
    return source(name, path)


def _write(made: ImportedTrace, found: Read) -> None:
    told = tables(found.trace)
    for name, schema, columns in (("calls", CALLS, told["calls"]), ("spans", SPANS, told["spans"])):
        pq.write_table(pa.table(columns["columns"], schema=schema), folder(made) / f"{name}.parquet")
    steps = sorted({call.step for call in found.trace.calls} | {span.step for span in found.trace.spans})[:10_000]
    kept = ImportedTrace.objects.filter(pk=made.pk).update(
        format=found.format,
        notes=found.notes,
        ranks=len(found.trace.ranks()),
        events=len(found.trace.calls) + len(found.trace.spans),
        steps=steps,
    )
    if not kept:
        raise TakenError
    made.refresh_from_db()


def trace_of(made: ImportedTrace, step: int) -> Trace:
    """The events of one of its steps.

    Raises:
        TakenError: it was deleted meanwhile.
    """
    try:
        calls, spans = (_columns(folder(made) / f"{name}.parquet", step) for name in ("calls", "spans"))
    except FileNotFoundError:
        raise TakenError from None
    return of_tables(calls, spans)


def _columns(path: Path, step: int) -> dict[str, list[Any]]:
    table = pq.read_table(path)
    columns: dict[str, list[Any]] = table.filter(pc.equal(table["step"], step)).to_pydict()
    return columns


def delete(made: ImportedTrace) -> None:
    """The row first: a folder that is left is found by `forget_old`."""
    place = folder(made)
    made.delete()
    shutil.rmtree(place, ignore_errors=True)


def forget_old() -> int:
    """Imports that are LASTS old, those never finished, and folders without one; how many imports went."""
    now = timezone.now()
    old = ImportedTrace.objects.filter(created__lt=now - LASTS)
    unfinished = ImportedTrace.objects.filter(format="", created__lt=now - UNFINISHED_LASTS)
    gone = [*old, *unfinished.exclude(pk__in=old.values("pk"))]
    for made in gone:
        delete(made)
    for left in _orphans():
        log.info("Deleting the leftover folder of an import: %s", left.name)
        shutil.rmtree(left, ignore_errors=True)
    return len(gone)


def _orphans() -> Iterator[Path]:
    """Older than any upload that has just begun."""
    root = Path(settings.STATE_DIR) / "imports"
    found = {path.name: path for path in root.iterdir()} if root.is_dir() else {}
    known = set(ImportedTrace.objects.filter(pk__in=list(found)).values_list("pk", flat=True))
    young = timezone.now() - UNFINISHED_LASTS
    return (path for name, path in found.items() if name not in known and path.stat().st_mtime < young.timestamp())


assert tuple(CALLS.names) == Call._fields
assert tuple(SPANS.names) == Span._fields
