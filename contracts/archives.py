"""Archives of scripts that users upload: limits, and members that are safe to write.

The board reads an archive before it stores it, and each host reads it again while it unpacks it. An archive contains
only files and folders. Links are refused, so no member can lead out of the folder into which it is written.
"""

from __future__ import annotations

import gzip
import stat
import struct
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import PurePosixPath
from typing import IO, NamedTuple

MAX_ARCHIVE_BYTES = 20_000_000
MAX_UNPACKED_BYTES = 200_000_000  # of all files
MAX_ENTRIES = 10_000  # files and folders
MAX_PATH_BYTES = 1000
MAX_NAME_BYTES = 255  # limit of file systems
MAX_DEPTH = 50  # folders in each other
MAX_READ_BYTES = 2**16  # also of one header, which tarfile reads at once
MAX_STREAM_BYTES = MAX_UNPACKED_BYTES + MAX_ENTRIES * 2048  # with headers and padding
MAX_SHOWN_CHARS = 100  # of a path in a message
GZIP_MAGIC, ZIP_MAGIC, ZIP_ENTRY_MAGIC = b"\x1f\x8b", b"PK", b"PK\x01\x02"
ENCRYPTED_FLAG = 0x1
CONTROL_CATEGORIES = ("Cc", "Zl", "Zp")  # control characters, and separators of lines and paragraphs
# Errors of tarfile, zipfile, and gzip for damaged archives. They declare only the first three.
DAMAGE = (
    *(tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError, OSError, ValueError, struct.error),
    *(LookupError, OverflowError, RecursionError, NotImplementedError, AttributeError, TypeError),
)


class ArchiveError(Exception):
    """An archive that Meshboard does not unpack. The message contains the reason and the fix."""


class Entry(NamedTuple):
    """A file or folder of an archive. Read `parts` before the next entry."""

    path: PurePosixPath
    is_folder: bool
    is_executable: bool
    parts: Iterator[bytes]


class ArchiveSummary(NamedTuple):
    """The content of a valid archive."""

    paths: tuple[str, ...]  # of files, in the order of the archive
    num_bytes: int  # unpacked


def read_archive(file: IO[bytes]) -> Iterator[Entry]:
    """Yield the entries of a .tar.gz or .zip archive. Raises ArchiveError."""
    magic = file.read(2)
    file.seek(0)
    if magic == GZIP_MAGIC:
        entries = _read_tar(file)
    elif magic == ZIP_MAGIC:
        entries = _read_zip(file)
    else:
        raise ArchiveError("The file is neither a .tar.gz nor a .zip archive. Upload one of these formats.")
    yield from _check_entries(entries)


def check_archive(file: IO[bytes]) -> ArchiveSummary:
    """Read a whole archive, and return its content. Raises ArchiveError."""
    paths, num_bytes = [], 0
    for entry in read_archive(file):
        num_bytes += sum(map(len, entry.parts))
        if not entry.is_folder:
            paths.append(str(entry.path))
    if not paths:
        raise ArchiveError("The archive contains no file. Pack the folder of the script.")
    return ArchiveSummary(tuple(paths), num_bytes)


class _Member(NamedTuple):
    """A member before its check. `problem` says why it is not allowed, or is empty."""

    name: str
    is_folder: bool
    is_executable: bool
    problem: str
    content: IO[bytes] | None


def _check_entries(members: Iterator[_Member]) -> Iterator[Entry]:
    """Refuse members with unsafe or repeated paths, and more members or bytes than allowed."""
    files: set[PurePosixPath] = set()
    folders: set[PurePosixPath] = set()
    left_bytes = [MAX_UNPACKED_BYTES]
    while (member := _read_next(members)) is not None:
        path = _parse_path(member.name)
        if member.problem:
            raise ArchiveError(f"{_quote(member.name)} {member.problem}")
        if not path.parts and member.is_folder:  # the folder itself, as in `tar -C FOLDER .`
            continue
        parents = set(path.parents) - {PurePosixPath()}
        if not path.parts or path in files or (path in folders and not member.is_folder) or parents & files:
            raise ArchiveError(f"{_quote(member.name)} is twice in the archive. Pack the folder again.")
        folders |= parents
        (folders if member.is_folder else files).add(path)
        if len(files) + len(folders) > MAX_ENTRIES:
            raise ArchiveError(
                f"The archive has more than {MAX_ENTRIES:,} files and folders. Leave out data, caches, and packages."
            )
        parts = iter(()) if member.content is None else _read_parts(member.content, left_bytes)
        yield Entry(path, member.is_folder, member.is_executable, parts)


def _read_next(members: Iterator[_Member]) -> _Member | None:
    try:
        return next(members, None)
    except DAMAGE as error:
        raise _describe_damage(error) from None


def _read_parts(content: IO[bytes], left_bytes: list[int]) -> Iterator[bytes]:
    while True:
        try:
            part = content.read(MAX_READ_BYTES)
        except DAMAGE as error:
            raise _describe_damage(error) from None
        if not part:
            return
        left_bytes[0] -= len(part)
        if left_bytes[0] < 0:
            raise _make_bomb_error()
        yield part


def _make_bomb_error() -> ArchiveError:
    return ArchiveError(
        f"The unpacked archive has more than {MAX_UNPACKED_BYTES // 10**6} MB. Leave out data and checkpoints."
    )


def _describe_damage(error: Exception) -> ArchiveError:
    text = " ".join(str(error).split())[:MAX_SHOWN_CHARS] or type(error).__name__
    return ArchiveError(f"The archive is damaged or incomplete: {text}. Pack and upload the folder again.")


def _parse_path(name: str) -> PurePosixPath:
    """Return the path of a member below the folder. Raises ArchiveError."""
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        raise ArchiveError(f"{_quote(name)} is not a UTF-8 name. Rename the file.") from None
    path = PurePosixPath(name)
    if any(unicodedata.category(character) in CONTROL_CATEGORIES for character in name):
        problem = "has a control character or a line break in its name. Rename the file."
    elif path.is_absolute() or ".." in path.parts:
        problem = "leads out of the archive. Pack the folder with relative paths, without '..'."
    elif len(encoded) > MAX_PATH_BYTES or any(len(part.encode()) > MAX_NAME_BYTES for part in path.parts):
        problem = f"is too long. Use at most {MAX_NAME_BYTES} bytes per name, and {MAX_PATH_BYTES:,} bytes per path."
    elif len(path.parts) > MAX_DEPTH:
        problem = f"is more than {MAX_DEPTH} folders deep. Move the file."
    else:
        return path
    raise ArchiveError(f"{_quote(name)} {problem}")


def _quote(name: str) -> str:
    return ascii(name if len(name) <= MAX_SHOWN_CHARS else f"{name[:MAX_SHOWN_CHARS]}...")


class _BoundedStream:
    """A decompressed stream that ends large reads, backward reads, and bombs."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._position = 0
        self.last = b""  # the latest part

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MAX_READ_BYTES:
            raise ArchiveError("The archive has a header that is too large. Pack the folder again, with tar.")
        part = self.last = self._stream.read(size)
        self._position += len(part)
        if self._position > MAX_STREAM_BYTES:
            raise _make_bomb_error()
        return part

    def seek(self, position: int) -> None:
        if position < self._position:
            raise ArchiveError("The archive has overlapping files. Pack the folder again, with tar.")
        while self._position < position:
            if not self.read(min(MAX_READ_BYTES, position - self._position)):
                raise EOFError("the last file is cut")

    def tell(self) -> int:
        return self._position


def _read_tar(file: IO[bytes]) -> Iterator[_Member]:
    stream = _BoundedStream(gzip.GzipFile(fileobj=file))  # type: ignore[arg-type]  # it reads bytes
    with tarfile.open(fileobj=stream, mode="r:") as tar:  # type: ignore[call-overload]
        for member in tar:
            is_file = member.isreg() and not member.issparse()
            problem = "" if is_file or member.isdir() else _explain_type(member)
            content = tar.extractfile(member) if is_file else None
            yield _Member(member.name, member.isdir(), bool(member.mode & stat.S_IXUSR), problem, content)
        if stream.last.strip(b"\0"):  # tarfile takes an invalid header for the end of the archive
            raise tarfile.ReadError("a header is invalid")
    while stream.read(MAX_READ_BYTES):  # to the checksum
        pass


def _explain_type(member: tarfile.TarInfo) -> str:
    if member.issym() or member.islnk():
        return "is a link. Pack the files themselves, with `tar --dereference --hard-dereference`."
    if member.issparse():
        return "is a sparse file. Pack the folder without the option `--sparse`."
    return "is a device or a pipe. Leave it out."


def _read_zip(file: IO[bytes]) -> Iterator[_Member]:
    _check_zip_size(file)
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            problem = ""
            if kind == stat.S_IFLNK:
                problem = "is a link. Pack the files themselves, without the option `--symlinks` of zip."
            elif kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                problem = "is a device or a pipe. Leave it out."
            elif info.flag_bits & ENCRYPTED_FLAG:
                problem = "is encrypted. Pack the folder without a password."
            elif info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                problem = "has an unusual compression. Pack the folder with zip, or as .tar.gz."
            content = archive.open(info) if not problem and not info.is_dir() else None
            is_executable = bool(info.external_attr >> 16 & stat.S_IXUSR)
            # `filename` ends at the first NUL.
            yield _Member(info.orig_filename, info.is_dir(), is_executable, problem, content)


def _check_zip_size(file: IO[bytes]) -> None:
    """Count the entries of a zip file before zipfile reads all of them into memory."""
    found, rest = 0, b""
    for part in iter(lambda: file.read(MAX_READ_BYTES), b""):
        found += (rest + part).count(ZIP_ENTRY_MAGIC)
        rest = part[-len(ZIP_ENTRY_MAGIC) + 1 :]
    file.seek(0)
    if found > MAX_ENTRIES:
        raise ArchiveError(
            f"The archive has more than {MAX_ENTRIES:,} files and folders. Leave out data, caches, and packages."
        )


def list_scripts(paths: tuple[str, ...], limit: int) -> list[str]:
    """Return the Python files nearest to the top of an archive, which a form offers as scripts."""
    scripts = sorted((path for path in paths if path.endswith(".py")), key=lambda path: (path.count("/"), path))
    return list(islice(scripts, limit))
