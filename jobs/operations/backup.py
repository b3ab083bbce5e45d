"""Back up the database, histories, imports, and uploads of a board to one file, and restore them.

Jobs continue during a backup. The tar file has `meta.json`, the rows as JSON lines for SQLite and PostgreSQL, and the
files of histories, imports, and uploads. It has no settings and no data of Redis. A fingerprint of the secret key shows
whether sessions and hosts stay valid.
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
META, ROWS, HISTORY, IMPORTS, UPLOADS = "meta.json", "database.jsonl.gz", "history", "imports", "uploads"
CREATED_BY_MIGRATE = {"contenttypes.ContentType", "auth.Permission"}  # rows refer to them by natural keys
# Errors of Django and gzip for a damaged file.
UNREADABLE = (serializers.base.DeserializationError, CommandError, DatabaseError, OSError, EOFError, UnicodeDecodeError)
MAX_HISTORY_TRIES = 20  # while the recorder replaces files
SALT = b"meshboard backup: which secret key"


class BackupError(Exception):
    """The backup or restore failed and changed nothing. The text says why."""


class BackupMeta(TypedDict):
    """Description of a backup."""

    v: int
    made: str
    database: str
    migrations: list[str]  # the last of each app, which need to match the rows
    rows: dict[str, int]
    histories: int
    key: str  # fingerprint of the secret key


class _BackupVersion(TypedDict):
    v: int


WHOLE, VERSIONED = TypeAdapter(BackupMeta), TypeAdapter(_BackupVersion)


def backup(target: Path) -> BackupMeta:
    """Write a backup. The file appears only when it is complete. Raises BackupError."""
    if target.exists():
        raise BackupError(f"{target} already exists. Use another file name.")
    if not target.parent.is_dir():
        raise BackupError(f"{target.parent} is not a folder. Use an existing folder.")
    draft = target.with_name(target.name + ".part")
    with _make_scratch_folder(target) as scratch:
        rows = Path(scratch) / ROWS
        with _read_snapshot():
            counts = _dump(rows)
        meta: BackupMeta = {
            "v": VERSION,
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "database": connection.vendor,
            "migrations": _get_migrations(),
            "rows": counts,
            "histories": 0,
            "key": compute_fingerprint(settings.SECRET_KEY),
        }
        with (
            _delete_on_error(draft),
            os.fdopen(os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out,
        ):
            with tarfile.open(fileobj=out, mode="w") as tar:
                tar.add(rows, ROWS)
                meta["histories"] = sum(_add_history(tar, job, attempt) for job, attempt in _histories())
                for name in (IMPORTS, UPLOADS):
                    _add_files(tar, settings.STATE_DIR / name, name)
                _add(tar, META, json.dumps(meta, indent=1).encode())
            out.flush()
            os.fsync(out.fileno())
        draft.replace(target)
    return meta


def restore(source: Path, *, replace: bool = False) -> tuple[BackupMeta, list[str]]:
    """Restore a backup and return its description and notes for the user. Raises BackupError.

    Args:
        replace: Replace existing data. Existing histories, imports, and uploads are moved to another folder.
    """
    with (
        _open_backup(source) as tar,
        tempfile.TemporaryDirectory(dir=settings.STATE_DIR, prefix=".restore-") as scratch,
    ):
        meta = _read_meta(tar, source)
        if meta["migrations"] != _get_migrations():
            raise BackupError(
                "The backup is from another version of Meshboard. Restore the backup with that version, then upgrade. "
                f"The database migrations differ: {_format_difference(meta['migrations'], _get_migrations())}."
            )
        call_command("migrate", verbosity=0)
        _check_empty(replace)
        made = Path(scratch)
        _unpack(tar, made)
        with ExitStack() as put, transaction.atomic():
            _load(made / ROWS)
            if (found := _count_rows()) != meta["rows"]:
                difference = _format_difference(_format_counts(meta["rows"]), _format_counts(found))
                raise BackupError(f"The restored rows differ from the backup: {difference}.")
            notes = put.enter_context(_replace_folder(made / HISTORY, Path(settings.HISTORY_DIR)))
            for name in (IMPORTS, UPLOADS):
                notes += put.enter_context(_replace_folder(made / name, settings.STATE_DIR / name))
    if meta["key"] != compute_fingerprint(settings.SECRET_KEY):
        notes.append(
            "The secret key differs from the key of the backup. Users need to log in again, hosts need to join again, "
            "and project variables are unreadable. To avoid this, add the old key to MESHBOARD_SECRET_KEY_FALLBACKS."
        )
    return meta, notes


def compute_fingerprint(secret_key: str) -> str:
    """Return a hash that recognizes a secret key and does not reveal it."""
    return hashlib.scrypt(secret_key.encode(), salt=SALT, n=2**14, r=8, p=1, dklen=16).hex()


def _make_scratch_folder(target: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(dir=target.parent, prefix=".backup-")
    except OSError as error:
        raise BackupError(f"Cannot create a file in {target.parent}: {error.strerror}. Use another folder.") from None


@contextmanager
def _delete_on_error(draft: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


class _ExactTimeEncoder(DjangoJSONEncoder):
    """JSON encoder that keeps microseconds, which the encoder of Django drops."""

    def default(self, o: Any) -> Any:
        return o.isoformat() if isinstance(o, datetime) else super().default(o)


@contextmanager
def _read_snapshot() -> Iterator[None]:
    """Read from one snapshot without blocking writers. `transaction.atomic` would take the write lock of SQLite."""
    connection.ensure_connection()
    begin = "BEGIN" if connection.vendor == "sqlite" else "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
    with connection.cursor() as cursor:
        cursor.execute(begin)
        try:
            yield
        finally:
            cursor.execute("ROLLBACK")


def _get_models() -> list[type[models.Model]]:
    """Return all models with an own table."""
    every = [(app, list(app.get_models())) for app in apps.get_app_configs()]
    ordered = serializers.sort_dependencies(every, allow_cycles=True)
    return [one for one in ordered if one._meta.label not in CREATED_BY_MIGRATE and one._meta.managed]


def _dump(target: Path) -> dict[str, int]:
    counts = {}
    with gzip.open(target, "wt", encoding="utf-8", compresslevel=6) as out:
        for model in _get_models():
            counts[model._meta.label] = model._base_manager.count()
            rows = model._base_manager.order_by("pk").iterator(chunk_size=1000)
            serializers.serialize("jsonl", rows, stream=out, use_natural_foreign_keys=True, cls=_ExactTimeEncoder)
    return counts


def _load(rows: Path) -> None:
    """Replace all rows."""
    call_command("flush", interactive=False, verbosity=0)
    try:
        call_command("loaddata", str(rows), verbosity=0)
    except UNREADABLE as error:
        raise BackupError(f"Cannot read the database rows in the backup: {error}") from None


def _count_rows() -> dict[str, int]:
    return {model._meta.label: model._base_manager.count() for model in _get_models()}


def _get_migrations() -> list[str]:
    return sorted(".".join(node) for node in MigrationLoader(None).graph.leaf_nodes())


def _histories() -> Iterator[tuple[str, int]]:
    return iterate_histories(Path(settings.HISTORY_DIR))


def _add_history(tar: tarfile.TarFile, job: str, attempt: int) -> bool:
    """Add the files of one manifest, opened together. Return False if there is none."""
    folder = HistoryFolder(Path(settings.HISTORY_DIR), job, attempt)
    for _ in range(MAX_HISTORY_TRIES):
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
                continue  # replaced since the manifest was read
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
def _open_backup(source: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(source, mode="r:") as tar:
            yield tar
    except FileNotFoundError as error:
        if error.filename != str(source):
            raise
        raise BackupError(f"{source} does not exist.") from None
    except tarfile.TarError as error:  # includes members outside the folder
        raise BackupError(f"{source} is not a complete backup: {error}") from None


def _unpack(tar: tarfile.TarFile, folder: Path) -> None:
    """Extract files below a folder. Raises tarfile.TarError. The filters of Python need 3.11.4."""
    for member in tar:
        name = Path(member.name)
        content = tar.extractfile(member) if member.isfile() else None
        if content is None or name.is_absolute() or ".." in name.parts:
            raise tarfile.TarError(f"{member.name!r} does not belong in a backup")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with content, (folder / name).open("wb") as out:
            shutil.copyfileobj(content, out)


def _read_meta(tar: tarfile.TarFile, source: Path) -> BackupMeta:
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


def _check_empty(replace: bool) -> None:
    if not explain_unhealthy() and Lease.objects.filter(name=CONTROLLER).exclude(holder="").exists():
        raise BackupError("A controller is running on this board. Stop the web server, controller, and recorder first.")
    there: dict[str, type[models.Model]] = {"users": get_user_model(), "jobs": Job, "hosts": Host}
    counts = {name: model._base_manager.count() for name, model in there.items()}
    if any(counts.values()) and not replace:
        content = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        raise BackupError(f"This board is not empty ({content}). To delete the data of this board, use --replace.")


@contextmanager
def _replace_folder(made: Path, folder: Path) -> Iterator[list[str]]:
    """Replace a folder and yield a note about it. After an error, the previous folder is restored."""
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
    except shutil.Error as error:  # a list of errors per file
        raise BackupError(f"Cannot copy the restored files to their folder: {error.args[0][0][2]}") from None


def _format_counts(counts: dict[str, int]) -> list[str]:
    return [f"{count} {name}" for name, count in counts.items()]


def _format_difference(one: list[str], other: list[str]) -> str:
    return f"only the backup has {sorted(set(one) - set(other))}, only the board has {sorted(set(other) - set(one))}"
