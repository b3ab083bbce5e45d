"""Checkpoints of a gang whose hosts share no checkpoint root: files travel between ranks, over the group that saving
has to itself. A checkpoint is collected on rank 0's host, and brought to every host that lacks it before a run goes on.

Where all hosts see the same files nothing travels.
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
from workers.checkpoint.coordination import on_every_rank, on_first_rank
from workers.checkpoint.manifest import MANIFEST, read_manifest, regular
from workers.disk import DISK_FULL_ERRNOS, format_free_bytes
from workers.trainer.errors import UserError

CHUNK_BYTES = 16 * 2**20
MEETING = 16  # chunks after which all ranks meet


class _Seen(NamedTuple):
    """What a rank knows of a job's checkpoints on its host."""

    numbers: frozenset[folder.Number]
    sound: frozenset[folder.Number]  # of these, whose files have the sizes that were written
    leads: bool  # it is the first rank of its host, which receives for all


def collect(draft: Path, files: dict[str, tuple[int, int]], group: dist.ProcessGroup | None) -> None:
    """Send what rank 0 does not see of a draft to it. All ranks call this alike.

    Raises:
        UserError: on all ranks, when it cannot be written there.
    """
    if group is None:
        return
    missing = on_first_rank(lambda: sorted(name for name in files if not (draft / name).is_file()), group)
    trouble, way = "", _Way(group)
    for name in missing:
        trouble = way.bring(draft / name, files[name][0], _owner(name), 0, files[name][1]) or trouble
    on_every_rank(lambda: _must_be_well(trouble), group)


def discard(draft: Path) -> None:
    """Once it was published, or will not be: what a host still has of it, and of those before it. Rank 0 may have begun
    a later one."""
    if _leads_host():
        folder.discard_drafts(draft)


def bring(job: Path, group: dist.ProcessGroup | None, keep: int) -> list[folder.Number]:
    """The newest whole checkpoint of a job, to every host of the gang that lacks it. All ranks call this alike, and are
    given those that were damaged wherever they lay.

    `keep`: how many a host keeps; what came is judged again when it is loaded.

    Raises:
        UserError: on all ranks, when it cannot be written somewhere.
    """
    damaged: list[folder.Number] = []
    if group is None:
        return damaged
    seen = on_every_rank(lambda: _seen(job), group)
    leaders = [rank for rank, one in enumerate(seen) if one.leads]
    for number in sorted({number for one in seen for number in one.numbers}, reverse=True):
        holders = [leader for leader in leaders if number in seen[leader].sound]
        lacking = [leader for leader in leaders if leader not in holders]
        if not lacking or any(_bring(job, number, holder, lacking, keep, group) for holder in holders):
            break
        damaged.append(number)
    return damaged


def _bring(
    job: Path, number: folder.Number, source: int, lacking: list[int], keep: int, group: dist.ProcessGroup
) -> bool:
    """False where the source's is damaged. Raises UserError."""
    path = _path(job, number)
    rank, draft, way = group.rank(), folder.draft_of(path), _Way(group)
    files = on_every_rank(lambda: _described(path) if rank == source else {}, group)[source]
    if not files:
        return False
    for receiver in lacking:
        # Another host of those that lack it may share this one's root.
        if on_every_rank(lambda: bool(_described(path)), group)[receiver]:
            continue
        trouble = _made(draft) if rank == receiver else ""
        for name, (size, crc) in files.items():
            here = draft if rank == receiver else path
            trouble = way.bring(here / name, size, source, receiver, crc) or trouble
        damaged = bool(on_every_rank(partial(str, trouble), group)[source])
        end = partial(_end, draft, path, damaged, trouble, keep) if rank == receiver else _nothing
        on_every_rank(end, group)
        if damaged:
            return False
    return True


def _end(draft: Path, path: Path, damaged: bool, trouble: str, keep: int) -> None:
    """What becomes of a draft that was sent, on its host. Raises UserError."""
    if damaged or trouble:
        shutil.rmtree(draft, ignore_errors=True)
    if damaged:
        return
    _must_be_well(trouble or _kept(draft, path))
    folder.retain(path.parents[1], keep, path)


def _nothing() -> None:
    """Of a rank that sent or waited."""


def _seen(job: Path) -> _Seen:
    numbers = numbers_of(job)
    sound = [one for one in numbers if _described(_path(job, one))]
    return _Seen(frozenset(numbers), frozenset(sound), _leads_host())


def _path(job: Path, number: folder.Number) -> Path:
    attempt, step = number
    return folder.step_folder(job / str(attempt), step)


def numbers_of(job: Path) -> list[folder.Number]:
    """Of a job's complete checkpoints on this host, the newest last."""
    found = [c for c in folder.complete_below(job) if c.path.parent.parent == job and c.path.parent.name.isdecimal()]
    return [(int(one.path.parent.name), one.step) for one in found]


def _leads_host() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _described(path: Path) -> dict[str, tuple[int, int | None]]:
    """(bytes, CRC-32) of a checkpoint's files, the manifest last: with it the checkpoint is complete. None of one that
    cannot be read, or whose files have other sizes than were written."""
    try:
        files = {**read_manifest(path).files, MANIFEST: ((path / MANIFEST).stat().st_size, None)}
        return files if all((path / name).stat().st_size == size for name, (size, _) in files.items()) else {}
    except (UserError, OSError):
        return {}


def _made(draft: Path) -> str:
    """An empty draft; "" or what went wrong."""
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    except OSError as error:
        return _words(error, draft)
    return ""


def _kept(draft: Path, path: Path) -> str:
    """Give a draft its name, for all is there; "" or what went wrong."""
    if _described(path):  # it came to be seen meanwhile, on a root that is shared
        shutil.rmtree(draft, ignore_errors=True)
        return ""
    shutil.rmtree(path, ignore_errors=True)  # half deleted or damaged, or it would not be lacking
    try:
        draft.rename(path)
    except OSError as error:
        return _words(error, draft)
    return ""


class _Way:
    """Files from one rank to another, while all meet now and then: they wait for each other only so long."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._chunks = group, 0

    def bring(self, path: Path, size: int, source: int, receiver: int, crc: int | None) -> str:
        """All ranks call this alike. All of it is sent, and taken, whatever goes wrong: this is given in the end, or
        "". `crc`: what the source must find."""
        rank, group = self._group.rank(), self._group
        file = _End(path, "rb" if rank == source else "wb" if rank == receiver else "")
        for count in _chunks(size):
            if rank == source:
                part = torch.zeros(count, dtype=torch.uint8)
                file.read(_bytes(part))
                dist.send(part, group=group, group_dst=receiver)
            elif rank == receiver:
                part = torch.empty(count, dtype=torch.uint8)
                dist.recv(part, group=group, group_src=source)
                file.write(_bytes(part))
            self._meet(file)
        self._meet(file)
        return file.closed(crc)

    def _meet(self, file: _End) -> None:
        self._chunks += 1
        if self._chunks % MEETING == 0:
            file.sync()
            dist.barrier(self._group)


class _End:
    """Of what passes from file to file. After the first trouble nothing more is done with it."""

    def __init__(self, path: Path, mode: Literal["rb", "wb", ""]) -> None:
        self._path, self._mode, self._trouble, self._crc = path, mode, "", 0
        self._file: BinaryIO | None = None
        if mode:
            self._try(self._open)

    def read(self, part: memoryview) -> None:
        if self._file is not None and not self._trouble:
            self._try(partial(self._file.readinto, part))  # type: ignore[attr-defined]  # of what `open` gives
            self._crc = zlib.crc32(part, self._crc)

    def write(self, part: memoryview) -> None:
        if self._file is not None and not self._trouble:
            self._try(partial(self._file.write, part))

    def sync(self) -> None:
        """What was written, to the disk: all of a large file at its end could take longer than others wait."""
        if self._file is not None and self._mode == "wb" and not self._trouble:
            self._try(self._sync)

    def closed(self, crc: int | None) -> str:
        """Once it is closed, and what was written is on disk: "" or what went wrong."""
        if self._file is not None:
            self._try(self._close)
        if self._mode == "rb" and crc is not None and crc != self._crc:
            return self._trouble or f"{self._path.name} changed after it was written"
        return self._trouble

    def _open(self) -> None:
        self._file = open(self._path, "rb", opener=regular) if self._mode == "rb" else self._path.open("wb")  # noqa: SIM115

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
            self._trouble = self._trouble or _words(error, self._path)


def _bytes(part: torch.Tensor) -> memoryview:
    """Of a tensor, in place."""
    held: Any = part.numpy()
    return memoryview(held)


def _chunks(size: int) -> Iterator[int]:
    for begin in range(0, size, CHUNK_BYTES):
        yield min(CHUNK_BYTES, size - begin)


def _owner(name: str) -> int:
    """The rank that wrote a file: `__RANK_n.distcp`, and rank 0 all else."""
    parts = name.split("_")
    return int(parts[2]) if name.startswith("__") else 0


def _must_be_well(trouble: str) -> None:
    if trouble:
        raise UserError(f"Cannot copy the checkpoint to this host: {trouble}")


def _words(error: OSError, path: Path) -> str:
    free = format_free_bytes(path) if error.errno in DISK_FULL_ERRNOS else ""
    return f"{error.strerror or error}: {error.filename or path}{free}"
