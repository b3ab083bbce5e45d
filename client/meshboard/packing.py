"""Pack a script or its folder into an archive that is equal for equal files."""

from __future__ import annotations

import gzip
import io
import os
import re
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from pathspec import GitIgnoreSpec

from meshboard.errors import WrongError, format_error

MAX_ARCHIVE_BYTES = 20_000_000
MAX_UNPACKED_BYTES = 200_000_000
MAX_ENTRIES = 10_000
MAX_NAMED_FILES = 5
MAX_NAME_CHARS = 80
IGNORE_FILES = (".gitignore", ".meshboardignore")
SKIPPED_FOLDERS = {".git", ".hg", ".svn", "__pycache__", ".venv", "venv", "node_modules", ".ipynb_checkpoints"}
SKIPPED_FOLDERS |= {".mypy_cache", ".ruff_cache", ".pytest_cache"}
GIT_SOURCE = re.compile(
    r"(?P<address>(?:(?:https?|ssh|git|file)://[^/]*/|[\w.-]+@[\w.-]+:)[^@]+)(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?"
)
GIT_TIMEOUT_S = 300
WAY_OUT = "List files to leave out in .meshboardignore, which has the format of .gitignore."


class PackedScript(NamedTuple):
    """An archive in memory. `files` has the path and size of each file, and `notes` the files that were left out."""

    name: str
    content: bytes
    files: list[tuple[str, int]]
    notes: list[str]


def pack(source: str) -> PackedScript:
    """Pack a folder, a single file, or a git repository: its address, and optionally "@" and a branch, tag, or commit.

    Raises:
        WrongError: The source does not exist, or is too large. Names the largest files.
    """
    if matched := GIT_SOURCE.fullmatch(source):
        return _pack_repository(source, matched["address"], matched["revision"] or "HEAD")
    path = Path(source)
    try:
        top = path.resolve(strict=True)
        if top.is_dir():
            found, notes = _list_folder(top)
        elif top.is_file():
            found, notes = [(path.name, top)], []
        else:
            raise WrongError(f"--upload {source}: Use a file or a folder.", "--upload")
        return _pack(top.name or "folder", source, found, notes)
    except OSError as error:
        raise WrongError(f"--upload {source}: {format_error(error)}: {error.filename}", "--upload") from None


def _pack_repository(source: str, address: str, revision: str) -> PackedScript:
    """Pack a commit of a git repository. The name of the archive ends with the commit."""
    name = re.split(r"[/:]", address.rstrip("/"))[-1].removesuffix(".git") or "repository"
    with tempfile.TemporaryDirectory() as work:
        top = Path(work, "tree")
        _run_git(source, "init", "--quiet", str(top))
        try:
            _run_git(source, "-C", str(top), "fetch", "--quiet", "--depth=1", address, revision)
        except WrongError:  # a server that offers only branches and tags, and a short commit
            branches = "+refs/heads/*:refs/remotes/origin/*"
            _run_git(source, "-C", str(top), "fetch", "--quiet", "--tags", address, branches)
            _run_git(source, "-C", str(top), "checkout", "--quiet", "--detach", revision)
        else:
            _run_git(source, "-C", str(top), "checkout", "--quiet", "--detach", "FETCH_HEAD")
        commit = _run_git(source, "-C", str(top), "rev-parse", "HEAD").strip()
        found, notes = _list_folder(top.resolve())
        return _pack(f"{name}@{commit[:12]}", source, found, [*notes, *_list_submodules(top)])


def _list_submodules(top: Path) -> list[str]:
    return ["submodules of the repository"] if (top / ".gitmodules").exists() else []


def _run_git(source: str, *arguments: str) -> str:
    """Run git without prompts, and return its output."""
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1"}
    try:
        done = subprocess.run(
            ["git", *arguments], env=environment, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise WrongError(
            f"--upload {source}: git is not installed. Install git, or use a folder.", "--upload"
        ) from None
    except subprocess.TimeoutExpired:
        raise WrongError(f"--upload {source}: git took longer than {GIT_TIMEOUT_S} s.", "--upload") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"git ended with exit code {done.returncode}"])[-1]
        raise WrongError(f"--upload {source}: {reason}", "--upload")
    return done.stdout


def _pack(name: str, source: str, found: list[tuple[str, Path]], notes: list[str]) -> PackedScript:
    files = [(relative, file.stat().st_size) for relative, file in found]
    if not files:
        raise WrongError(f"--upload {source}: The folder has no files to upload.", "--upload")
    if len(files) > MAX_ENTRIES:
        raise WrongError(
            f"--upload {source}: The folder has more than {MAX_ENTRIES:,} files. {WAY_OUT}",
            "--upload",
        )
    unpacked = sum(size for _, size in files)
    if unpacked > MAX_UNPACKED_BYTES:
        raise _make_size_error(source, f"{unpacked / 1e6:,.0f} MB", MAX_UNPACKED_BYTES, files)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for relative, file in found:
            _add_file(tar, relative, file)
    content = gzip.compress(packed.getvalue(), compresslevel=6, mtime=0)
    if len(content) > MAX_ARCHIVE_BYTES:
        raise _make_size_error(source, f"{len(content) / 1e6:,.1f} MB compressed", MAX_ARCHIVE_BYTES, files)
    return PackedScript(f"{name[:MAX_NAME_CHARS]}.tar.gz", content, files, notes)


def _make_size_error(source: str, size: str, maximum: int, files: list[tuple[str, int]]) -> WrongError:
    largest = sorted(files, key=lambda one: -one[1])[:MAX_NAMED_FILES]
    names = ", ".join(f"{name} ({size / 1e6:,.1f} MB)" for name, size in largest)
    return WrongError(
        f"--upload {source}: The files have {size}, and the maximum is {maximum // 10**6} MB. "
        f"The largest files are {names}. {WAY_OUT} Put data into the data root of the hosts.",
        "--upload",
    )


def _add_file(tar: tarfile.TarFile, relative: str, file: Path) -> None:
    """Add a file without its owner and times, which would change the checksum of equal files."""
    with file.open("rb") as content:
        status = os.fstat(content.fileno())
        member = tarfile.TarInfo(relative)
        member.size = status.st_size
        member.mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
        tar.addfile(member, content)


def _list_folder(top: Path) -> tuple[list[tuple[str, Path]], list[str]]:
    """Return the files to pack in a fixed order, and notes about files that are left out."""
    notes: list[str] = []
    return list(islice(_walk(top, "", [], notes), MAX_ENTRIES + 1)), notes


def _walk(top: Path, base: str, rules: list[tuple[str, GitIgnoreSpec]], notes: list[str]) -> Iterator[tuple[str, Path]]:
    """Yield the files below a folder in a fixed order. `rules`: ignore files by their folder, the nearest last."""
    folder = top / base
    if ignored := _read_ignore_files(folder):
        rules = [*rules, (base, ignored)]
    for entry in sorted(os.scandir(folder), key=lambda one: one.name):
        relative = f"{base}/{entry.name}" if base else entry.name
        path, is_folder = Path(entry.path), entry.is_dir(follow_symlinks=False)
        if (is_folder and entry.name in SKIPPED_FOLDERS) or _is_ignored(rules, relative + "/" * is_folder):
            continue
        if is_folder:
            yield from _walk(top, relative, rules, notes)
        elif path.is_file() and path.resolve().is_relative_to(top):
            yield relative, path
        else:
            notes.append(f"{relative} is not a file in this folder")


def _read_ignore_files(folder: Path) -> GitIgnoreSpec:
    lines = []
    for name in IGNORE_FILES:
        with suppress(FileNotFoundError):
            lines += (folder / name).read_text("utf-8", errors="replace").splitlines()
    return GitIgnoreSpec.from_lines(lines)


def _is_ignored(rules: list[tuple[str, GitIgnoreSpec]], relative: str) -> bool:
    """Return whether the nearest ignore file with a matching line ignores a path."""
    for base, spec in reversed(rules):
        ignores = spec.check_file(relative.removeprefix(f"{base}/") if base else relative).include
        if ignores is not None:
            return ignores
    return False
