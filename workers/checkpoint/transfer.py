"""Copy checkpoints between hosts that share no checkpoint root, over the process group for saves.

A checkpoint is collected on rank 0's host. Before a run resumes, it is copied to every host without it. On a shared
root nothing is copied.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import torch
import torch.distributed as dist

from workers.checkpoint import folder
from workers.checkpoint.coordination import run_on_every_rank, run_on_first_rank
from workers.checkpoint.manifest import MANIFEST, open_regular, read_manifest
from workers.disk import DISK_FULL_ERRNOS, format_free_bytes
from workers.trainer.errors import UserError

CHUNK_BYTES = 16 * 2**20
BARRIER_CHUNKS = 16  # chunks between barriers


class _HostState(NamedTuple):
    """Store the checkpoints of a job on the host of a rank."""

    numbers: frozenset[folder.CheckpointId]
    undamaged: frozenset[folder.CheckpointId]  # checkpoints whose files have the saved sizes
    is_first_on_host: bool  # first rank of its host, which receives for all


def collect_files(draft: Path, files: dict[str, tuple[int, int]], group: dist.ProcessGroup | None) -> None:
    """Send files of a draft to rank 0 if it does not see them. All ranks call this together.

    Raises:
        UserError: on all ranks, if rank 0 cannot write.
    """
    if group is None:
        return
    missing = run_on_first_rank(lambda: sorted(name for name in files if not (draft / name).is_file()), group)
    problem, transfer = "", _FileTransfer(group)
    for name in missing:
        problem = transfer.copy(draft / name, files[name][0], _get_writer_rank(name), 0, files[name][1]) or problem
    run_on_every_rank(lambda: _raise_problem(problem), group)


def discard_draft(draft: Path) -> None:
    """Delete a draft that is published or failed, and earlier drafts on this host."""
    if _is_first_on_host():
        folder.delete_drafts(draft)


def distribute(job: Path, group: dist.ProcessGroup | None, keep: int) -> list[folder.CheckpointId]:
    """Copy the newest undamaged checkpoint of a job to every host without it. All ranks call this together.

    Each host keeps `keep` checkpoints. Returns the checkpoints that are damaged on all their hosts.

    Raises:
        UserError: on all ranks, if a host cannot write.
    """
    damaged: list[folder.CheckpointId] = []
    if group is None:
        return damaged
    states = run_on_every_rank(lambda: _get_host_state(job), group)
    leaders = [rank for rank, one in enumerate(states) if one.is_first_on_host]
    for number in sorted({number for one in states for number in one.numbers}, reverse=True):
        holders = [leader for leader in leaders if number in states[leader].undamaged]
        receivers = [leader for leader in leaders if leader not in holders]
        if not receivers or any(_copy_to_hosts(job, number, holder, receivers, keep, group) for holder in holders):
            break
        damaged.append(number)
    return damaged


def _copy_to_hosts(
    job: Path, number: folder.CheckpointId, source: int, receivers: list[int], keep: int, group: dist.ProcessGroup
) -> bool:
    """Copy a checkpoint, and return False if the source is damaged."""
    path = _path(job, number)
    rank, draft, transfer = group.rank(), folder.get_draft_path(path), _FileTransfer(group)
    files = run_on_every_rank(lambda: _describe_undamaged(path) if rank == source else {}, group)[source]
    if not files:
        return False
    for receiver in receivers:
        # Another receiver may share this host's root.
        if run_on_every_rank(lambda: bool(_describe_undamaged(path)), group)[receiver]:
            continue
        problem = _create_draft(draft) if rank == receiver else ""
        for name, (size, crc) in files.items():
            folder_here = draft if rank == receiver else path
            problem = transfer.copy(folder_here / name, size, source, receiver, crc) or problem
        damaged = bool(run_on_every_rank(partial(str, problem), group)[source])
        end = partial(_finish_draft, draft, path, damaged, problem, keep) if rank == receiver else _do_nothing
        run_on_every_rank(end, group)
        if damaged:
            return False
    return True


def _finish_draft(draft: Path, path: Path, damaged: bool, problem: str, keep: int) -> None:
    """Publish or delete a received draft, and raise a `UserError` if it cannot be written."""
    if damaged or problem:
        shutil.rmtree(draft, ignore_errors=True)
    if damaged:
        return
    _raise_problem(problem or _publish_draft(draft, path))
    folder.retain_newest(path.parents[1], keep, path)


def _do_nothing() -> None:
    """Take part as a rank that only sends or waits."""


def _get_host_state(job: Path) -> _HostState:
    numbers = list_checkpoint_ids(job)
    undamaged = [one for one in numbers if _describe_undamaged(_path(job, one))]
    return _HostState(frozenset(numbers), frozenset(undamaged), _is_first_on_host())


def _path(job: Path, number: folder.CheckpointId) -> Path:
    attempt, step = number
    return folder.get_step_folder(job / str(attempt), step)


def list_checkpoint_ids(job: Path) -> list[folder.CheckpointId]:
    """Return the ids of a job's complete checkpoints on this host, newest last."""
    found = [c for c in folder.list_complete(job) if c.path.parent.parent == job and c.path.parent.name.isdecimal()]
    return [(int(one.path.parent.name), one.step) for one in found]


def _is_first_on_host() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _describe_undamaged(path: Path) -> dict[str, tuple[int, int | None]]:
    """Return (bytes, CRC-32) of a checkpoint's files, the manifest last.

    The result is empty if a file is unreadable or has a different size.
    """
    try:
        files = {**read_manifest(path).files, MANIFEST: ((path / MANIFEST).stat().st_size, None)}
        return files if all((path / name).stat().st_size == size for name, (size, _) in files.items()) else {}
    except (UserError, OSError):
        return {}


def _create_draft(draft: Path) -> str:
    """Create an empty draft, and return the problem or an empty text."""
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    except OSError as error:
        return _format_os_error(error, draft)
    return ""


def _publish_draft(draft: Path, path: Path) -> str:
    """Rename a complete draft, and return the problem or an empty text."""
    if _describe_undamaged(path):  # Another rank published it on a shared root.
        shutil.rmtree(draft, ignore_errors=True)
        return ""
    shutil.rmtree(path, ignore_errors=True)  # partly deleted or damaged
    try:
        draft.rename(path)
    except OSError as error:
        return _format_os_error(error, draft)
    return ""


class _FileTransfer:
    """Copy files from rank to rank, with regular barriers so that no rank times out."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._chunks = group, 0

    def copy(self, path: Path, size: int, source: int, receiver: int, crc: int | None) -> str:
        """Copy a file. All ranks call this together. `crc` is the expected CRC-32 of the source.

        The transfer continues after an error. Returns the problem, or an empty text.
        """
        rank, group = self._group.rank(), self._group
        file = _FileEnd(path, "rb" if rank == source else "wb" if rank == receiver else "")
        for count in _chunks(size):
            if rank == source:
                part = torch.zeros(count, dtype=torch.uint8)
                file.read(_get_buffer(part))
                dist.send(part, group=group, group_dst=receiver)
            elif rank == receiver:
                part = torch.empty(count, dtype=torch.uint8)
                dist.recv(part, group=group, group_src=source)
                file.write(_get_buffer(part))
            self._synchronize(file)
        self._synchronize(file)
        return file.close(crc)

    def _synchronize(self, file: _FileEnd) -> None:
        self._chunks += 1
        if self._chunks % BARRIER_CHUNKS == 0:
            file.sync()
            dist.barrier(self._group)


class _FileEnd:
    """One end of a file transfer. After the first problem, it does nothing."""

    def __init__(self, path: Path, mode: Literal["rb", "wb", ""]) -> None:
        self._path, self._mode, self._problem, self._crc = path, mode, "", 0
        self._file: BinaryIO | None = None
        if mode:
            self._try(self._open)

    def read(self, part: memoryview) -> None:
        if self._file is not None and not self._problem:
            self._try(partial(self._file.readinto, part))  # type: ignore[attr-defined]  # BinaryIO lacks readinto
            self._crc = zlib.crc32(part, self._crc)

    def write(self, part: memoryview) -> None:
        if self._file is not None and not self._problem:
            self._try(partial(self._file.write, part))

    def sync(self) -> None:
        """Flush written data to disk. A flush at the end of a large file could take too long."""
        if self._file is not None and self._mode == "wb" and not self._problem:
            self._try(self._sync)

    def close(self, crc: int | None) -> str:
        """Close the file, and return the problem or an empty text."""
        if self._file is not None:
            self._try(self._close)
        if self._mode == "rb" and crc is not None and crc != self._crc:
            return self._problem or f"{self._path.name} changed after it was written"
        return self._problem

    def _open(self) -> None:
        self._file = open(self._path, "rb", opener=open_regular) if self._mode == "rb" else self._path.open("wb")  # noqa: SIM115

    def _close(self) -> None:
        assert self._file is not None
        with self._file:
            if self._mode == "wb":
                self._sync()

    def _sync(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            self._problem = self._problem or _format_os_error(error, self._path)


def _get_buffer(part: torch.Tensor) -> memoryview:
    """Return the memory of a tensor."""
    held: Any = part.numpy()
    return memoryview(held)


def _chunks(size: int) -> Iterator[int]:
    for begin in range(0, size, CHUNK_BYTES):
        yield min(CHUNK_BYTES, size - begin)


def _get_writer_rank(name: str) -> int:
    """Return the rank that wrote a file: `__RANK_n.distcp`, or rank 0 for other files."""
    parts = name.split("_")
    return int(parts[2]) if name.startswith("__") else 0


def _raise_problem(problem: str) -> None:
    if problem:
        raise UserError(f"Cannot copy the checkpoint to this host: {problem}")


def _format_os_error(error: OSError, path: Path) -> str:
    free = format_free_bytes(path) if error.errno in DISK_FULL_ERRNOS else ""
    return f"{error.strerror or error}: {error.filename or path}{free}"
