"""A board in one file, and back: its database at one moment, its histories and imports. Jobs run meanwhile.

The file is a tar: `meta.json`, the rows as JSON lines, which SQLite and PostgreSQL both read, and the files of
histories and imports. No setting is in it: of the secret key it has a fingerprint, by which a restore says whether
sessions and hosts will be known again. Redis is left out: what it holds is told again, or has been recorded.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from django.apps import apps
from django.conf import settings
from django.contrib.auth import get_user_model
from django.core import serializers
from django.core.management import CommandError, call_command
from django.core.serializers.json import DjangoJSONEncoder
from django.db import DatabaseError, connection, models, transaction
from django.db.migrations.loader import MigrationLoader
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from jobs.models import Host, Job, Lease
from jobs.queue.work_lease import CONTROLLER as CONTROLLER
from jobs.queue.work_lease import explain_unhealthy
from jobs.runs.history.store.folder import MANIFEST, HistoryFolder, NoHistoryError, iterate_histories

VERSION = 1
META, ROWS, HISTORY, IMPORTS = "meta.json", "database.jsonl.gz", "history", "imports"
MADE_BY_MIGRATE = {"contenttypes.ContentType", "auth.Permission"}  # rows name them by words, not by number
# What Django and gzip say of a file that somebody changed.
UNREADABLE = (serializers.base.DeserializationError, CommandError, DatabaseError, OSError, EOFError, UnicodeDecodeError)
TRIES = 20  # for a history whose recorder replaces files under us
SALT = b"meshboard backup: which secret key"


class BackupError(Exception):
    """Nothing was changed; says why."""


class Meta(TypedDict):
    """What a backup says of itself."""

    v: int
    made: str
    database: str
    migrations: list[str]  # the last of each app: rows of other ones would not fit
    rows: dict[str, int]
    histories: int
    key: str  # fingerprint of the secret key


class _Versioned(TypedDict):
    v: int


WHOLE, VERSIONED = TypeAdapter(Meta), TypeAdapter(_Versioned)


def backup(target: Path) -> Meta:
    """Write the file; one that was cut off is never there under its name.

    Raises:
        BackupError: the target is there already, or its folder is not, or takes no file.
    """
    if target.exists():
        raise BackupError(f"{target} already exists. Use another file name.")
    if not target.parent.is_dir():
        raise BackupError(f"{target.parent} is not a folder. Use an existing folder.")
    draft = target.with_name(target.name + ".part")
    with _beside(target) as scratch:
        rows = Path(scratch) / ROWS
        with _one_moment():
            counts = _dump(rows)
        told: Meta = {
            "v": VERSION,
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "database": connection.vendor,
            "migrations": _migrations(),
            "rows": counts,
            "histories": 0,
            "key": fingerprint(settings.SECRET_KEY),
        }
        with _kept_if_whole(draft), os.fdopen(os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
            with tarfile.open(fileobj=out, mode="w") as tar:
                tar.add(rows, ROWS)
                told["histories"] = sum(_add_history(tar, job, attempt) for job, attempt in _histories())
                _add_files(tar, settings.STATE_DIR / IMPORTS, IMPORTS)
                _add(tar, META, json.dumps(told, indent=1).encode())
            out.flush()
            os.fsync(out.fileno())
        draft.replace(target)
    return told


def restore(source: Path, *, replace: bool = False) -> tuple[Meta, list[str]]:
    """Make this board what the file says; returns that, and what somebody should know.

    `replace`: also where there is something already; its histories and imports are moved aside.

    Raises:
        BackupError: nothing was changed.
    """
    with _opened(source) as tar, tempfile.TemporaryDirectory(dir=settings.STATE_DIR, prefix=".restore-") as scratch:
        told = _meta(tar, source)
        if told["migrations"] != _migrations():
            raise BackupError(
                "The backup is from another version of Meshboard. Restore the backup with that version, then upgrade. "
                f"The database migrations differ: {_apart(told['migrations'], _migrations())}."
            )
        call_command("migrate", verbosity=0)
        _refuse_to_overwrite(replace)
        made = Path(scratch)
        _unpack(tar, made)
        with ExitStack() as put, transaction.atomic():
            _load(made / ROWS)
            if (found := _counts()) != told["rows"]:
                raise BackupError(
                    f"The restored rows differ from the backup: {_apart(_lines(told['rows']), _lines(found))}."
                )
            notes = put.enter_context(_put(made / HISTORY, Path(settings.HISTORY_DIR)))
            notes += put.enter_context(_put(made / IMPORTS, settings.STATE_DIR / IMPORTS))
    if told["key"] != fingerprint(settings.SECRET_KEY):
        notes.append(
            "The secret key differs from the key of the backup. Users need to log in again, hosts need to join again, "
            "and project variables are unreadable. To avoid this, add the old key to MESHBOARD_SECRET_KEY_FALLBACKS."
        )
    return told, notes


def fingerprint(secret_key: str) -> str:
    """By which a key is known again and not found out."""
    return hashlib.scrypt(secret_key.encode(), salt=SALT, n=2**14, r=8, p=1, dklen=16).hex()


def _beside(target: Path) -> tempfile.TemporaryDirectory[str]:
    """On the disk that is to hold it."""
    try:
        return tempfile.TemporaryDirectory(dir=target.parent, prefix=".backup-")
    except OSError as error:
        raise BackupError(f"Cannot create a file in {target.parent}: {error.strerror}. Use another folder.") from None


@contextmanager
def _kept_if_whole(draft: Path) -> Iterator[None]:
    """On a disk that it filled it would take the room that is missed."""
    try:
        yield
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


class _Exact(DjangoJSONEncoder):
    """Django's own cuts times to milliseconds."""

    def default(self, o: Any) -> Any:
        return o.isoformat() if isinstance(o, datetime) else super().default(o)


@contextmanager
def _one_moment() -> Iterator[None]:
    """What is read until the end is of one moment, and nobody who writes waits for us: not Django's `atomic`, which
    takes SQLite's lock for writing."""
    connection.ensure_connection()
    begin = "BEGIN" if connection.vendor == "sqlite" else "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
    with connection.cursor() as cursor:
        cursor.execute(begin)
        try:
            yield
        finally:
            cursor.execute("ROLLBACK")


def _models() -> list[type[models.Model]]:
    """All that have a table of their own to keep."""
    every = [(app, list(app.get_models())) for app in apps.get_app_configs()]
    ordered = serializers.sort_dependencies(every, allow_cycles=True)
    return [one for one in ordered if one._meta.label not in MADE_BY_MIGRATE and one._meta.managed]


def _dump(target: Path) -> dict[str, int]:
    counts = {}
    with gzip.open(target, "wt", encoding="utf-8", compresslevel=6) as out:
        for model in _models():
            counts[model._meta.label] = model._base_manager.count()
            rows = model._base_manager.order_by("pk").iterator(chunk_size=1000)
            serializers.serialize("jsonl", rows, stream=out, use_natural_foreign_keys=True, cls=_Exact)
    return counts


def _load(rows: Path) -> None:
    """In place of all rows there are."""
    call_command("flush", interactive=False, verbosity=0)
    try:
        call_command("loaddata", str(rows), verbosity=0)
    except UNREADABLE as error:
        raise BackupError(f"Cannot read the database rows in the backup: {error}") from None


def _counts() -> dict[str, int]:
    return {model._meta.label: model._base_manager.count() for model in _models()}


def _migrations() -> list[str]:
    return sorted(".".join(node) for node in MigrationLoader(None).graph.leaf_nodes())


def _histories() -> Iterator[tuple[str, int]]:
    return iterate_histories(Path(settings.HISTORY_DIR))


def _add_history(tar: tarfile.TarFile, job: str, attempt: int) -> bool:
    """The files that one manifest names, all open before the first is copied; False where there is none."""
    folder = HistoryFolder(Path(settings.HISTORY_DIR), job, attempt)
    for _ in range(TRIES):
        try:
            manifest = folder.read_manifest()
        except NoHistoryError:
            return False
        names = [part["file"] for parts in manifest["parts"].values() for part in parts]
        names += [manifest["state"]] if manifest["state"] else []
        with ExitStack() as stack:
            try:
                files = {name: stack.enter_context((folder.path / name).open("rb")) for name in names}
            except FileNotFoundError:
                continue  # it was replaced: the next manifest says by what
            for name, file in files.items():
                _add_open(tar, f"{HISTORY}/{job}/{attempt}/{name}", file)
            _add(tar, f"{HISTORY}/{job}/{attempt}/{MANIFEST}", json.dumps(manifest).encode())
            return True
    raise BackupError(f"The history of job {job}, attempt {attempt}, changed during the backup. Try again.")


def _add_files(tar: tarfile.TarFile, folder: Path, name: str) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                _add_open(tar, f"{name}/{path.relative_to(folder)}", file)


def _add_open(tar: tarfile.TarFile, name: str, file: IO[bytes]) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = os.fstat(file.fileno()).st_size, 0o600
    tar.addfile(info, file)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o600
    tar.addfile(info, io.BytesIO(content))


@contextmanager
def _opened(source: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(source, mode="r:") as tar:
            yield tar
    except FileNotFoundError as error:
        if error.filename != str(source):
            raise
        raise BackupError(f"{source} does not exist.") from None
    except tarfile.TarError as error:  # of a member that would leave the folder, too
        raise BackupError(f"{source} is not a complete backup: {error}") from None


def _unpack(tar: tarfile.TarFile, folder: Path) -> None:
    """Files below the folder and nothing else: Python's own filters came with 3.11.4. Raises tarfile.TarError."""
    for member in tar:
        name = Path(member.name)
        content = tar.extractfile(member) if member.isfile() else None
        if content is None or name.is_absolute() or ".." in name.parts:
            raise tarfile.TarError(f"{member.name!r} does not belong in a backup")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with content, (folder / name).open("wb") as out:
            shutil.copyfileobj(content, out)


def _meta(tar: tarfile.TarFile, source: Path) -> Meta:
    try:
        member = tar.extractfile(META)
        content = member.read() if member is not None else b""
        version = VERSIONED.validate_json(content)["v"]
        if version != VERSION:
            raise BackupError(
                f"{source} has backup format {version}. This version of Meshboard reads format {VERSION}."
            )
        return WHOLE.validate_json(content)
    except KeyError as error:
        raise BackupError(f"{source} is not a complete backup: {error}") from None
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))} {one['msg']}" for one in error.errors())
        raise BackupError(f"{source} is not a complete backup: {META}: {wrong}.") from None


def _refuse_to_overwrite(replace: bool) -> None:
    if not explain_unhealthy() and Lease.objects.filter(name=CONTROLLER).exclude(holder="").exists():
        raise BackupError("A controller is running on this board. Stop the web server, controller, and recorder first.")
    there: dict[str, type[models.Model]] = {"users": get_user_model(), "jobs": Job, "hosts": Host}
    counts = {name: model._base_manager.count() for name, model in there.items()}
    if any(counts.values()) and not replace:
        told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        raise BackupError(f"This board is not empty ({told}). To delete the data of this board, use --replace.")


@contextmanager
def _put(made: Path, folder: Path) -> Iterator[list[str]]:
    """In place of what was there, which is moved aside; says so. It comes back if what is done meanwhile fails."""
    aside = folder.with_name(f"{folder.name}-before-{datetime.now(UTC):%Y%m%d-%H%M%S}")
    moved = folder.exists() and any(folder.iterdir())
    if moved:
        folder.rename(aside)
    try:
        if made.exists():
            _copy(made, folder)
        yield [f"The previous files of {folder} are now in {aside}."] if moved else []
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if moved:
            aside.rename(folder)
        raise


def _copy(made: Path, folder: Path) -> None:
    try:
        shutil.copytree(made, folder, dirs_exist_ok=True)
    except shutil.Error as error:  # a list of what went wrong, file by file
        raise BackupError(f"Cannot copy the restored files to their folder: {error.args[0][0][2]}") from None


def _lines(counts: dict[str, int]) -> list[str]:
    return [f"{count} {name}" for name, count in counts.items()]


def _apart(one: list[str], other: list[str]) -> str:
    """What one list has and the other has not."""
    return f"only the backup has {sorted(set(one) - set(other))}, only the board has {sorted(set(other) - set(one))}"
