"""Store imported traces: first the uploaded files, then their events as Parquet in the layout of the history."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import threading
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
from django.conf import settings
from django.contrib.auth.models import User
from django.db import transaction
from django.utils import timezone
from pydantic import Field
from typing_extensions import TypedDict

from jobs.core import received_files
from jobs.core.received_files import PartError
from jobs.models import ImportedTrace
from jobs.models.validators import NoteRule, check_name
from jobs.planning.planner_processes import BusyError
from jobs.runs.traces.imports.common import ImportProblemError
from jobs.runs.traces.imports.reader_process import (
    DeletedFilesError,
    ImportFinding,
    ReadSummary,
    read_findings,
    read_in_process,
    read_progress,
)
from jobs.runs.traces.imports.trace_files import TraceFile
from jobs.runs.traces.trace_events import EventTrace, parse_trace
from planner.facts.validation import NO_NUL, Problem, SpecError, StrictModel

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 256 * 2**20
MAX_IMPORT_BYTES = 512 * 2**20
MAX_FILES = 64
MAX_IMPORTS_PER_USER = 20  # per user
IMPORT_LIFETIME = timedelta(days=30)
UNFINISHED_LIFETIME = timedelta(hours=1)
MAX_CONCURRENT_READS = 2  # per web process. Each has a child process of `reader_process.MAX_MEMORY_BYTES`
READ_SLOT_TIMEOUT_S = 5.0
_read_slots = threading.BoundedSemaphore(MAX_CONCURRENT_READS)


class TooManyImportsError(RuntimeError):
    """The user has the maximum number of imports."""


class ImportInUseError(RuntimeError):
    """Another request is reading the import or has deleted it."""

    def __init__(self) -> None:
        super().__init__("Another request is reading this import, or has deleted it. Try again.")


def get_folder(imported: ImportedTrace) -> Path:
    """Return the folder of an import, whose name has no text of a user."""
    assert re.fullmatch(r"[a-z2-7]{1,16}", imported.id)
    return Path(settings.STATE_DIR) / "imports" / imported.id


def create_import(owner: Any, name: str, files: list[tuple[str, int]]) -> ImportedTrace:
    """Create an import that accepts files. Raise TooManyImportsError if the user has the maximum number."""
    delete_expired()
    with transaction.atomic():
        User.objects.select_for_update(no_key=True).get(pk=owner.pk)  # serialize concurrent requests of the user
        if ImportedTrace.objects.filter(owner=owner).count() >= MAX_IMPORTS_PER_USER:
            raise TooManyImportsError(
                f"You already have {MAX_IMPORTS_PER_USER} imports, the maximum. Delete an import first."
            )
        imported = ImportedTrace.objects.create(
            owner=owner, name=name, files=files, size=sum(size for _, size in files)
        )
        sent = get_folder(imported) / "sent"
        sent.mkdir(parents=True, mode=0o700)  # a full disk rolls the row back
        for index in range(len(files)):
            (sent / str(index)).touch()
    return imported


def append_part(imported: ImportedTrace, index: int, offset: int, part: bytes) -> int:
    """Append to a file, and return its bytes.

    Raises:
        ImportProblemError: The part does not begin at the end of the file, or exceeds the announced size.
        ImportInUseError: The import accepts no more parts.
        OSError: The disk is full. The file is unchanged.
    """
    name, size = imported.files[index]
    path = get_folder(imported) / "sent" / str(index)
    try:
        return received_files.append_part(path, offset, part, size)
    except FileNotFoundError:
        raise ImportInUseError from None
    except PartError as error:
        raise ImportProblemError(name, error.field, str(error)) from None


def finish_import(imported: ImportedTrace) -> None:
    """Read the uploaded files, store their events, and delete the files. Delete the import if it is invalid.

    Raises:
        ImportInUseError: Another request reads the import.
        BusyError: Too many imports are read at once, or the machine is too busy. The import is unchanged.
    """
    if not _read_slots.acquire(timeout=READ_SLOT_TIMEOUT_S):
        raise BusyError(f"The board is already reading {MAX_CONCURRENT_READS} imports, the maximum. Try again later.")
    folder = get_folder(imported)
    folder_being_read = folder / "reading"
    try:
        try:
            (folder / "sent").rename(folder_being_read)  # only one request of all processes succeeds
        except OSError:
            raise ImportInUseError from None
        try:
            files = [_get_trace_file(imported, folder_being_read, index) for index in range(len(imported.files))]
            _store_summary(imported, read_in_process(files, folder))
        except ImportProblemError:
            delete_import(imported)
            raise
        except FileNotFoundError:  # another request deleted the import
            if folder_being_read.exists():
                raise
            raise ImportInUseError from None
        except DeletedFilesError:
            raise ImportInUseError from None
        except ImportInUseError:
            raise
        except BaseException as error:
            with contextlib.suppress(OSError):
                folder_being_read.rename(folder / "sent")
            if isinstance(error, TimeoutError):
                raise BusyError(str(error)) from None
            raise
        shutil.rmtree(folder_being_read, ignore_errors=True)
    finally:
        _read_slots.release()


def _get_trace_file(imported: ImportedTrace, folder: Path, index: int) -> TraceFile:
    name, size = imported.files[index]
    path = folder / str(index)
    num_bytes = path.stat().st_size if path.exists() else 0
    if num_bytes != size:
        message = f"Only {num_bytes} of {size} bytes of the file arrived. Send the rest of the file."
        raise ImportProblemError(name, "size", message)
    return TraceFile(name, path)


def _store_summary(imported: ImportedTrace, summary: ReadSummary) -> None:
    if not ImportedTrace.objects.filter(pk=imported.pk).update(**summary._asdict()):
        raise ImportInUseError
    imported.refresh_from_db()


def get_read_fraction(imported: ImportedTrace) -> float | None:
    """Return the fraction of the uploaded bytes that a request has read, or None if no request reads them."""
    folder = get_folder(imported)
    return (read_progress(folder) or 0.0) if (folder / "reading").is_dir() else None


def get_findings(imported: ImportedTrace) -> list[ImportFinding]:
    """Return the hangs and mismatches in an import of flight recorder dumps, the cause first."""
    return read_findings(get_folder(imported))


def read_import_step(imported: ImportedTrace, step: int) -> EventTrace:
    """Return the events of a step. Raise ImportInUseError if the import was deleted."""
    columns: list[dict[str, list[Any]]] = []
    try:
        for name in ("calls", "spans"):
            table = pq.read_table(get_folder(imported) / f"{name}.parquet")
            columns.append(table.filter(pc.equal(table["step"], step)).to_pydict())
    except FileNotFoundError:
        raise ImportInUseError from None
    return parse_trace(calls=columns[0], spans=columns[1])


def delete_import(imported: ImportedTrace) -> None:
    path = get_folder(imported)  # the row goes first, because `delete_expired` finds folders without a row
    imported.delete()
    shutil.rmtree(path, ignore_errors=True)


def delete_expired() -> int:
    """Delete expired and unfinished imports and folders without an import. Return the number of imports deleted."""
    now = timezone.now()
    old = ImportedTrace.objects.filter(created__lt=now - IMPORT_LIFETIME)
    unfinished = ImportedTrace.objects.filter(format="", created__lt=now - UNFINISHED_LIFETIME)
    deleted = [*old, *unfinished.exclude(pk__in=old.values("pk"))]
    for imported in deleted:
        delete_import(imported)
    root = Path(settings.STATE_DIR) / "imports"
    found = {path.name: path for path in root.iterdir()} if root.is_dir() else {}
    known = set(ImportedTrace.objects.filter(pk__in=list(found)).values_list("pk", flat=True))
    max_mtime = (now - UNFINISHED_LIFETIME).timestamp()  # older than any upload in progress
    for orphan in (path for name, path in found.items() if name not in known and path.stat().st_mtime < max_mtime):
        log.info("Deleting the leftover folder of an import: %s", orphan.name)
        shutil.rmtree(orphan, ignore_errors=True)
    return len(deleted)


Title = Annotated[str, NoteRule]


class ImportFile(StrictModel):
    """Announce a file that the client will upload."""

    name: str = Field(min_length=1, max_length=255, pattern=NO_NUL)
    size: int = Field(ge=1, le=MAX_FILE_BYTES)


class ImportRequest(StrictModel):
    """Open an import."""

    name: Title | None = Field(default=None, description="Name of the import. Default: name of the first file.")
    files: list[ImportFile] = Field(min_length=1, max_length=MAX_FILES)


class UploadedFile(TypedDict):
    """Report the bytes of a file that arrived."""

    size: int


class ImportDetail(TypedDict):
    """Describe an import."""

    id: str
    name: str
    files: list[ImportFile]
    created: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    format: Annotated[str, Field(description="Format of the files. Empty before Meshboard has read the import.")]
    steps: list[int]
    findings: Annotated[
        list[ImportFinding], Field(description="Hangs and mismatches in flight recorder dumps, the cause first.")
    ]


def serialize_import(imported: ImportedTrace) -> ImportDetail:
    files = [ImportFile(name=name, size=size) for name, size in imported.files]
    return {
        "id": imported.id,
        "name": imported.name,
        "files": [file.model_dump() for file in files],  # type: ignore[misc]
        "created": imported.created.isoformat(),
        "format": imported.format,
        "steps": list(imported.steps),
        "findings": get_findings(imported),
    }


MAX_NAME_LENGTH = 100


def check_import_query(query: ImportRequest) -> tuple[str, list[tuple[str, int]]]:
    """Return the name of an import and its files with their bytes.

    Raises:
        SpecError: A name is invalid, two files have the same name, or the files are too large.
    """
    files = [(file.name, file.size) for file in query.files]
    problems = [problem for index, (name, _) in enumerate(files) for problem in check_name(f"files.{index}.name", name)]
    if problems:
        raise SpecError(problems)
    if len({name for name, _ in files}) < len(files):
        raise SpecError([Problem("files", "Two files have the same name. Rename one of the files.")])
    total = sum(size for _, size in files)
    if total > MAX_IMPORT_BYTES:
        message = f"The files have {total:,} bytes in total, and the maximum is {MAX_IMPORT_BYTES:,}."
        raise SpecError([Problem("files", message)])
    title = (query.name or "").strip()
    return (title or files[0][0])[:MAX_NAME_LENGTH], files
