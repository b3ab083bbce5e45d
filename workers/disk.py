"""Atomic file writes, JSON files that readers do not trust, removal of trees, and errors of a full disk."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
# A job cannot cause these errors before its ranks start.
HOST_ERRNOS = (
    *DISK_FULL_ERRNOS,
    errno.EROFS,
    errno.EIO,
    errno.ENOMEM,
    errno.EAGAIN,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENODEV,
)
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_OPEN_LEVELS = 32  # of a tree
MAX_SHOWN_PATH_CHARS = 200
MAX_JSON_BYTES = 2 * 2**20  # of a file to read, as contracts.codec.MAX_EXIT_REPORT_BYTES

log = logging.getLogger(__name__)


class DiskFullError(OSError):
    """A file did not fit on the disk. `needed` is its size in bytes."""

    needed = 0


def is_host_error(error: OSError) -> bool:
    """Return whether the machine causes the error, and not the spec of a job."""
    return error.errno in HOST_ERRNOS


def find_disk_full_error(error: BaseException | None) -> OSError | None:
    """Return the disk-full error in a chain of exceptions. Torch wraps it in errors of its own writer."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
            return error
        error = error.__cause__ or error.__context__
    return None


def format_disk_full(host: str, full: OSError, folder: Path, needs: str = "") -> str:
    """Format a disk-full error. `folder` is the target of a write if the error names no file."""
    return f"No disk space on {host}: {full.strerror}: {full.filename or folder}{needs}{format_free_bytes(folder)}"


def format_start_failure(host: str, error: Exception, folder: Path) -> str:
    """Format the reason why an attempt with its files in `folder` did not start."""
    if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
        needed = error.needed if isinstance(error, DiskFullError) else 0
        return format_disk_full(host, error, folder, f" needs {needed:,} bytes" if needed else "")
    text = f"{error}: '{folder}'" if isinstance(error, OSError) and error.filename is None else str(error)
    return f"Not started on {host}: {text}"


def format_free_bytes(folder: Path) -> str:
    """Format the free bytes of the disk of a folder, or of its nearest parent that exists."""
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        return f", {shutil.disk_usage(existing).free:,} bytes are free"
    except OSError:
        return ""


@contextmanager
def open_draft(target: Path) -> Iterator[Path]:
    """Yield a path in the folder of `target`, which is renamed to `target` at the end or removed on an exception.

    A killed process leaves its draft. The next writer of the file overwrites it.
    """
    draft = target.with_name(f".{target.name}.new")
    try:
        yield draft
        draft.replace(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


class BadFileError(ValueError):
    """A file with invalid type, size, or content."""


def write_json(path: Path, value: object) -> None:
    """Write a file and rename it, so that a reader sees all of it or none. Raises DiskFullError."""
    draft, body = path.with_name(f".{path.name}.{os.getpid()}"), json.dumps(value).encode()
    try:
        with draft.open("wb") as out:
            out.write(body)
            out.flush()
            os.fsync(out.fileno())
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        full = DiskFullError(error.errno, error.strerror, str(path))
        full.needed = len(body)
        raise full from error


def read_json(path: Path) -> Any:
    """Return the value in a file, or None if the file does not exist. Raises BadFileError, OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENOTDIR):  # a link, a socket, or a file as the folder
            raise BadFileError(f"{path.name}: {error.strerror}") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # reading a FIFO would block
        os.close(descriptor)
        raise BadFileError(f"{path.name} is not a regular file")
    with open(descriptor, "rb") as file:
        body = file.read(MAX_JSON_BYTES + 1)
    if len(body) > MAX_JSON_BYTES:
        raise BadFileError(f"{path.name} is larger than {MAX_JSON_BYTES:,} bytes")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadFileError(f"{path.name} is not JSON: {error}") from None


class _Level(NamedTuple):
    """A folder during a walk. Deep folders have no open `descriptor`, and are opened again as `..`."""

    name: str
    status: os.stat_result
    descriptor: int | None
    folders_left: list[str]


class TreeWalk:
    """Visit each entry of a tree after its content, without recursion and with few open files.

    The tree may be deeper than Python's recursion limit, and its paths longer than the kernel accepts.
    `unlock` gives the owner access to each folder. `first_error` says why an entry was left out.
    """

    def __init__(self, root: Path, *, unlock: bool = False) -> None:
        self._root, self._unlock = root, unlock
        self._levels: list[_Level] = []
        self._descriptor = -1  # of the current folder
        self.first_error: OSError | None = None

    def __iter__(self) -> Iterator[tuple[int, str, os.stat_result]]:
        """Yield the descriptor of the parent folder, the name, and the status of each entry below the root."""
        try:
            if self._enter(os.fspath(self._root), None):
                yield from self._list_files()
            while self._levels:
                level = self._levels[-1]
                if not level.folders_left:
                    self._leave()
                    if self._levels:
                        yield self._descriptor, level.name, level.status
                elif self._enter(name := level.folders_left.pop(), self._descriptor):
                    yield from self._list_files()
                elif (status := self._read_status(name)) is not None:
                    yield self._descriptor, name, status
        finally:
            for descriptor in {level.descriptor for level in self._levels} | {self._descriptor}:
                if descriptor is not None and descriptor >= 0:
                    os.close(descriptor)

    def note_error(self, error: OSError, name: str = "") -> None:
        """Keep the first error, because later errors are often its consequences."""
        if self.first_error is None and not isinstance(error, FileNotFoundError):
            path = "/".join([*(level.name for level in self._levels), *([name] if name else [])])
            shown = path if len(path) <= MAX_SHOWN_PATH_CHARS else f"...{path[-MAX_SHOWN_PATH_CHARS:]}"
            self.first_error = OSError(error.errno, error.strerror, shown)

    def _enter(self, name: str, parent: int | None) -> bool:
        """Make a folder the current folder, and return whether it is readable."""
        try:
            descriptor = _open_folder(name, parent, unlock=self._unlock)
        except OSError as error:
            self.note_error(error, name)
            return False
        if self._levels and self._levels[-1].descriptor is None:
            os.close(self._descriptor)
        is_deep = len(self._levels) >= MAX_OPEN_LEVELS
        self._descriptor = descriptor
        self._levels.append(_Level(name, os.fstat(descriptor), None if is_deep else descriptor, []))
        return True

    def _leave(self) -> None:
        """Make the parent the current folder."""
        self._levels.pop()
        left, self._descriptor = self._descriptor, -1
        try:
            if not self._levels:
                return
            parent = self._levels[-1]
            if parent.descriptor is not None:
                self._descriptor = parent.descriptor
                return
            self._descriptor = os.open("..", FOLDER_FLAGS, dir_fd=left)
            if not os.path.samestat(os.fstat(self._descriptor), parent.status):
                raise OSError(errno.ESTALE, "A process moved a folder during the walk", os.fspath(self._root))
        finally:
            os.close(left)

    def _list_files(self) -> Iterator[tuple[int, str, os.stat_result]]:
        """Yield the entries of the current folder that are not folders, and collect its folders."""
        folders = self._levels[-1].folders_left
        for name in os.listdir(self._descriptor):
            status = self._read_status(name)
            if status is None:
                continue
            if stat.S_ISDIR(status.st_mode):
                folders.append(name)
            else:
                yield self._descriptor, name, status

    def _read_status(self, name: str) -> os.stat_result | None:
        try:
            return os.lstat(name, dir_fd=self._descriptor)
        except OSError as error:
            self.note_error(error, name)
            return None


def _open_folder(name: str, parent: int | None, *, unlock: bool) -> int:
    """Open a folder, and no link. Raises OSError."""
    handle = os.open(name, FOLDER_FLAGS | os.O_PATH, dir_fd=parent)
    try:
        if unlock and os.fstat(handle).st_mode & stat.S_IRWXU != stat.S_IRWXU:
            with contextlib.suppress(OSError):  # The folder of another user can be readable anyway.
                os.chmod(f"/proc/self/fd/{handle}", stat.S_IRWXU)
        return os.open(".", FOLDER_FLAGS, dir_fd=handle)
    finally:
        os.close(handle)


def remove_path(path: Path) -> None:
    """Remove a file, a link, or a folder. Raise the first OSError after all other content is removed."""
    if path.is_symlink() or not path.is_dir():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
        return
    walk = TreeWalk(path, unlock=True)
    for parent, name, status in walk:
        try:
            (os.rmdir if stat.S_ISDIR(status.st_mode) else os.unlink)(name, dir_fd=parent)
        except OSError as error:
            walk.note_error(error, name)
    try:
        path.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        raise walk.first_error or error from None


def discard_path(path: Path) -> None:
    """Remove a file, a link, or a folder. Log what cannot be removed."""
    try:
        remove_path(path)
    except OSError as error:
        log.warning("cannot remove %s: %s", path, error)
