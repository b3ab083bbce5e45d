"""Archives of scripts that users upload: receive, check, find, and delete them.

The spec of a job names an upload by its checksum. Hosts download the archive when they start an attempt.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import tarfile
import threading
from datetime import timedelta
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from django.conf import settings
from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import Q, Sum
from django.utils import timezone
from pydantic import Field
from typing_extensions import TypedDict

from contracts.archives import MAX_ARCHIVE_BYTES, ArchiveError, ArchiveSummary, check_archive, list_scripts
from contracts.fields import SHA256_PATTERN
from jobs.core import received_files
from jobs.models import LIVE, Upload
from jobs.models.validators import check_name
from jobs.planning.planner_processes import BusyError
from planner.facts.spec import JobSpec
from planner.facts.validation import NO_NUL, Problem, SpecError, StrictModel

MAX_NAME_CHARACTERS = 100
MAX_UPLOADS_PER_USER = 500
MAX_BYTES_PER_USER = 500_000_000
MAX_LISTED_SCRIPTS = 200
MAX_SUGGESTED_SCRIPTS = 3
UNUSED_LIFETIME = timedelta(days=1)  # of an upload without jobs
LIFETIME = timedelta(days=30)  # after the newest job, or after the content was last sent
MAX_CONCURRENT_CHECKS = 2  # per web process
CHECK_SLOT_TIMEOUT_S = 5.0
_check_slots = threading.BoundedSemaphore(MAX_CONCURRENT_CHECKS)


class UploadConflictError(Exception):
    """The state of the upload or the quota of the user does not allow a request. `field` is the cause."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class UploadRequest(StrictModel):
    """Announce a .tar.gz or .zip archive, or a single Python file."""

    name: str = Field(
        min_length=1,
        max_length=MAX_NAME_CHARACTERS,
        pattern=NO_NUL,
        description="Name of the file. A name that ends in .py announces a single script.",
    )
    size: int = Field(ge=1, le=MAX_ARCHIVE_BYTES, description="Size of the file, in bytes.")
    sha256: str | None = Field(
        default=None,
        pattern=SHA256_PATTERN,
        description="SHA-256 of the file. If you uploaded this file before, you do not need to send it again.",
    )


class FinishUploadRequest(StrictModel):
    """Finish an upload."""

    sha256: str | None = Field(
        default=None, pattern=SHA256_PATTERN, description="SHA-256 of the file, which the board compares."
    )


class UploadBrief(TypedDict):
    """An upload of a script."""

    id: str
    name: str
    size: Annotated[int, Field(description="Size of the archive, in bytes.")]
    sha256: Annotated[
        str, Field(description="SHA-256 of the archive for the spec field `script.upload`. Empty until it is complete.")
    ]
    files: Annotated[int, Field(description="Number of files in the archive.")]
    unpacked_bytes: int
    sent: Annotated[str, Field(json_schema_extra={"format": "date-time"})]


class UploadDetail(UploadBrief):
    """An upload of a script, with the Python files that a job can run."""

    scripts: Annotated[list[str], Field(description=f"Python files nearest to the top, at most {MAX_LISTED_SCRIPTS}.")]


def get_folder() -> Path:
    return Path(settings.STATE_DIR) / "uploads"


def get_archive(upload: Upload) -> Path:
    """Return the file of a complete upload. Its name has no text of a user."""
    return _get_path(upload, "archive")


def _get_path(upload: Upload, state: str) -> Path:
    assert re.fullmatch(r"[a-z2-7]{1,16}", upload.id)
    return get_folder() / f"{upload.id}.{state}"


def check_upload_request(data: UploadRequest) -> UploadRequest:
    """Return a request with a valid name. Raises SpecError."""
    if problems := check_name("name", data.name):
        raise SpecError(problems)
    return data


def open_upload(owner: User, data: UploadRequest) -> Upload:
    """Return a new upload that accepts parts, or the complete upload of the announced content.

    Raises UploadConflictError if the user has the maximum number or size of uploads.
    """
    known = owner.uploads.filter(sha256=data.sha256).first() if data.sha256 else None
    if known is not None:
        return _renew(known)
    _delete_unneeded(Upload.objects.filter(owner=owner))
    with transaction.atomic():
        _lock_owner(owner)
        used = owner.uploads.aggregate(total=Sum("size"))["total"] or 0
        if owner.uploads.count() >= MAX_UPLOADS_PER_USER or used + data.size > MAX_BYTES_PER_USER:
            raise UploadConflictError(
                "size",
                f"You have {owner.uploads.count()} uploads of {used / 1e6:,.0f} MB, and the maximum is "
                f"{MAX_UPLOADS_PER_USER} uploads of {MAX_BYTES_PER_USER // 10**6} MB. "
                "Delete uploads with DELETE /api/v1/uploads/ID.",
            )
        upload = Upload.objects.create(owner=owner, name=data.name, size=data.size)
        get_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        _get_path(upload, "sent").touch(mode=0o600)  # a full disk rolls the row back
    return upload


def append_part(upload: Upload, offset: int, part: bytes) -> int:
    """Append a part, and return the number of received bytes. Raises PartError, UploadConflictError, OSError."""
    try:
        return received_files.append_part(_get_path(upload, "sent"), offset, part, upload.size)
    except FileNotFoundError:
        raise UploadConflictError("upload", "The upload is complete or deleted. Start a new upload.") from None


def finish_upload(upload: Upload, sha256: str | None) -> Upload:
    """Check the received file, and return its upload, which is an earlier one if the content is equal.

    An invalid file is deleted with its upload.

    Raises:
        SpecError: The file is incomplete or has another checksum, or the archive is refused.
        UploadConflictError: Another request finishes or deletes this upload.
        BusyError: Too many uploads are checked at once. The upload is unchanged.
    """
    if upload.sha256:
        return upload
    sent, checked = _get_path(upload, "sent"), _get_path(upload, "checked")
    if sent.exists() and (received := sent.stat().st_size) != upload.size:
        message = f"`size` is {upload.size:,}, but {received:,} bytes arrived. Send the rest of the file."
        raise SpecError([Problem("size", message)])
    if not _check_slots.acquire(timeout=CHECK_SLOT_TIMEOUT_S):
        raise BusyError(f"The board is already checking {MAX_CONCURRENT_CHECKS} uploads. Try again later.")
    try:
        try:
            sent.rename(checked)  # only one request of all processes succeeds
        except FileNotFoundError:
            message = "Another request finishes this upload, or has deleted it. Start a new upload."
            raise UploadConflictError("upload", message) from None
        try:
            _check_checksum(checked, sha256)
            if upload.name.endswith(".py"):
                _pack_script(checked, upload.name)
            with checked.open("rb") as file:
                summary = check_archive(file)
            return _store(upload, checked, summary)
        except ArchiveError as error:
            delete_upload(upload)
            raise SpecError([Problem("file", str(error))]) from None
        except SpecError:
            delete_upload(upload)
            raise
        except OSError:  # the disk is full, so a later request can succeed
            checked.rename(sent)
            raise
    finally:
        _check_slots.release()


def _check_checksum(path: Path, sha256: str | None) -> None:
    if sha256 is not None and (found := _compute_sha256(path)) != sha256:
        message = f"`sha256` is {sha256}, but the received file has {found}. Send the file again."
        raise SpecError([Problem("sha256", message)])


def _compute_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pack_script(path: Path, name: str) -> None:
    """Replace a single script by an archive, which is equal for an equal script."""
    content, packed = path.read_bytes(), io.BytesIO()
    member = tarfile.TarInfo(PurePosixPath(name).name)
    member.size = len(content)
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.addfile(member, io.BytesIO(content))
    draft = path.with_suffix(".packed")
    try:
        draft.write_bytes(gzip.compress(packed.getvalue(), mtime=0))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _store(upload: Upload, checked: Path, summary: ArchiveSummary) -> Upload:
    """Complete an upload, or delete it and return the earlier upload of an equal file."""
    sha256 = _compute_sha256(checked)
    with transaction.atomic():
        _lock_owner(upload.owner)
        known = Upload.objects.filter(owner=upload.owner, sha256=sha256).first()
        if known is None:
            fields = {
                "sha256": sha256,
                "size": checked.stat().st_size,
                "files": len(summary.paths),
                "unpacked_bytes": summary.num_bytes,
                "sent": timezone.now(),
            }
            if not Upload.objects.filter(pk=upload.pk).update(**fields):
                checked.unlink(missing_ok=True)
                raise UploadConflictError("upload", "The upload was deleted. Start a new upload.")
            checked.replace(get_archive(upload))
            upload.refresh_from_db()
            return upload
    delete_upload(upload)
    return _renew(known)


def _renew(upload: Upload) -> Upload:
    """Note that the content was sent again, which extends its lifetime."""
    Upload.objects.filter(pk=upload.pk).update(sent=timezone.now())
    upload.refresh_from_db()
    return upload


def _lock_owner(owner: User) -> None:
    """Serialize concurrent requests of a user."""
    User.objects.select_for_update(no_key=True).get(pk=owner.pk)


def delete_upload(upload: Upload) -> None:
    """Delete an upload with its files."""
    paths = [_get_path(upload, state) for state in ("sent", "checked", "archive")]
    upload.delete()
    for path in paths:
        path.unlink(missing_ok=True)


def delete_if_unused(upload: Upload) -> None:
    """Delete an upload. Raises UploadConflictError if a job that has not ended needs it."""
    if upload.jobs.filter(status__in=LIVE).exists():
        raise UploadConflictError("upload", "A job that has not ended needs this upload. Cancel the job first.")
    delete_upload(upload)


def delete_unneeded() -> int:
    """Delete uploads that no job needs, and files without an upload. Return the number of deleted uploads."""
    count = _delete_unneeded(Upload.objects.all())
    oldest = (timezone.now() - UNUSED_LIFETIME).timestamp()
    found = list(get_folder().iterdir()) if get_folder().is_dir() else []
    known = set(Upload.objects.values_list("pk", flat=True))
    for path in found:
        if path.name.partition(".")[0] not in known and path.stat().st_mtime < oldest:
            path.unlink(missing_ok=True)
    return count


def _delete_unneeded(uploads: Any) -> int:
    now = timezone.now()
    unused = Q(jobs=None, sent__lt=now - UNUSED_LIFETIME)
    old = Q(sent__lt=now - LIFETIME)
    count = 0
    for upload in uploads.filter(unused | old).distinct():
        if not upload.jobs.filter(Q(status__in=LIVE) | Q(created__gt=now - LIFETIME)).exists():
            delete_upload(upload)
            count += 1
    return count


def find_upload(owner: Any, spec: JobSpec) -> Upload | None:
    """Return the upload of the owner that a spec names, or None."""
    sha256 = None if spec.script is None else spec.script.upload
    return None if sha256 is None else Upload.objects.filter(owner=owner, sha256=sha256).first()


def find_upload_problems(owner: Any, spec: JobSpec) -> list[Problem]:
    """Return why a job cannot use the upload that its spec names."""
    script = spec.script
    if script is None or script.upload is None:
        return []
    upload = find_upload(owner, spec)
    paths = () if upload is None else list_paths(upload)
    if upload is None or not paths:
        message = f"`script.upload` is {script.upload[:12]}..., which is not one of your uploads. Upload the script."
        return [Problem("script.upload", message)]
    problems = []
    if script.path is not None and str(PurePosixPath(script.path)) not in paths:
        message = f"`script.path` is {script.path!r}, which is not in {upload.name}.{_suggest_scripts(paths)}"
        problems.append(Problem("script.path", message))
    if script.module is not None:
        base = script.module.replace(".", "/")
        if not {f"{base}.py", f"{base}/__main__.py"} & set(paths):
            message = f"`script.module` is {script.module!r}, but {upload.name} has no {base}.py."
            problems.append(Problem("script.module", message + _suggest_scripts(paths)))
    if script.cwd is not None:
        cwd = PurePosixPath(script.cwd)
        if not any(PurePosixPath(path).is_relative_to(cwd) and PurePosixPath(path) != cwd for path in paths):
            message = f"`script.cwd` is {script.cwd!r}, which is not a folder in {upload.name}. Use another folder."
            problems.append(Problem("script.cwd", message))
    return problems


def _suggest_scripts(paths: tuple[str, ...]) -> str:
    scripts = list_scripts(paths, MAX_SUGGESTED_SCRIPTS)
    return f" Use {' or '.join(scripts)}." if scripts else " The upload has no Python file."


def list_paths(upload: Upload) -> tuple[str, ...]:
    """Return the paths of the files of a complete upload. Empty if the archive is missing."""
    try:
        return _read_paths(get_archive(upload))
    except FileNotFoundError:
        return ()


@lru_cache(maxsize=32)
def _read_paths(archive: Path) -> tuple[str, ...]:
    with archive.open("rb") as file:
        return check_archive(file).paths


def serialize_upload(upload: Upload) -> UploadBrief:
    return {
        "id": upload.id,
        "name": upload.name,
        "size": upload.size,
        "sha256": upload.sha256,
        "files": upload.files,
        "unpacked_bytes": upload.unpacked_bytes,
        "sent": upload.sent.isoformat(),
    }


def describe_upload(upload: Upload) -> UploadDetail:
    """Return an upload with the Python files that a job can run."""
    scripts = list_scripts(list_paths(upload), MAX_LISTED_SCRIPTS) if upload.sha256 else []
    return {**serialize_upload(upload), "scripts": scripts}
