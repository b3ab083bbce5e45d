"""Checkpoints of a gang whose hosts share no checkpoint root: files travel between ranks, over the group that saving
has to itself. A checkpoint is collected on rank 0's host, and brought to every host that lacks it before a run goes on.

Where all hosts see the same files nothing travels.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import torch.distributed as dist

from workers.checkpoint import folder
from workers.checkpoint.agree import on_every_rank, on_first_rank
from workers.full import FULL, free_words
from workers.trainer.errors import UserError

CHUNK_BYTES = 16 * 2**20
Sizes = dict[str, int]  # bytes by file


class _Seen(NamedTuple):
    """What a rank knows of a job's checkpoints on its host."""

    newest: folder.Number | None
    leads: bool  # it is the first rank of its host, which receives for all


def collect(draft: Path, files: dict[str, tuple[int, int]], group: dist.ProcessGroup | None) -> None:
    """Send what rank 0 does not see of a draft to it. All ranks call this alike.

    Raises:
        UserError: on all ranks, when it cannot be written there.
    """
    if group is None:
        return
    missing = on_first_rank(lambda: sorted(name for name in files if not (draft / name).is_file()), group)
    rank, trouble = group.rank(), ""
    for name in missing:
        size, owner = files[name][0], _owner(name)
        if rank == owner:
            _send(draft / name, size, 0, group)
        elif rank == 0:
            trouble = trouble or _receive(draft / name, size, owner, group)
    on_first_rank(lambda: _must_be_well(trouble), group)


def discard_elsewhere(draft: Path) -> None:
    """After it was published: what a host that does not see rank 0's files still has of it."""
    if _leads_host():
        shutil.rmtree(draft, ignore_errors=True)


def bring(job: Path, group: dist.ProcessGroup | None) -> None:
    """The newest complete checkpoint of a job, to every host of the gang that lacks it. All ranks call this alike.

    Raises:
        UserError: on all ranks, when it cannot be written somewhere.
    """
    if group is None:
        return
    seen = on_every_rank(lambda: _Seen(newest_of(job), _leads_host()), group)
    newest = max((one.newest for one in seen if one.newest is not None), default=None)
    lacking = [rank for rank, one in enumerate(seen) if one.leads and one.newest != newest]
    if newest is None or not lacking:
        return
    source = next(rank for rank, one in enumerate(seen) if one.newest == newest)
    path = folder.step_folder(job / str(newest[0]), newest[1])
    rank = group.rank()
    told: list[Sizes | None] = on_every_rank(lambda: folder.sizes(path) if rank == source else None, group)
    sizes = told[source]
    assert sizes is not None
    trouble = ""
    for receiver in lacking:
        if rank == source:
            for name, size in sizes.items():
                _send(path / name, size, receiver, group)
        elif rank == receiver:
            trouble = _receive_all(path, sizes, source, group)
            folder.retain(job, 1)  # the one that was brought: what was here is older
    on_every_rank(lambda: _must_be_well(trouble), group)


def newest_of(job: Path) -> folder.Number | None:
    """The newest complete checkpoint of a job on this host."""
    found = [c for c in folder.complete_below(job) if c.path.parent.parent == job]
    return (int(found[-1].path.parent.name), found[-1].step) if found else None


def _leads_host() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _receive_all(path: Path, sizes: Sizes, source: int, group: dist.ProcessGroup) -> str:
    """Into a draft that gets its name when all is there; "" or what went wrong."""
    draft, trouble = folder.draft_of(path), ""
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    except OSError as error:
        trouble = _words(error, draft)
    for name, size in sizes.items():
        trouble = _receive(draft / name, size, source, group) or trouble
    if trouble:
        shutil.rmtree(draft, ignore_errors=True)
        return trouble
    shutil.rmtree(path, ignore_errors=True)  # half deleted, or it would not be lacking
    try:
        draft.rename(path)
    except OSError as error:
        return _words(error, draft)
    return ""


def _send(path: Path, size: int, receiver: int, group: dist.ProcessGroup) -> None:
    with path.open("rb") as file:
        for count in _chunks(size):
            part = torch.zeros(count, dtype=torch.uint8)
            file.readinto(_bytes(part))  # what was cut off is found by its checksum
            dist.send(part, group=group, group_dst=receiver)


def _bytes(part: torch.Tensor) -> memoryview:
    """Of a tensor, in place."""
    held: Any = part.numpy()
    return memoryview(held)


def _receive(path: Path, size: int, source: int, group: dist.ProcessGroup) -> str:
    """What is sent is taken whatever happens, or the sender would wait for ever; "" or what went wrong."""
    trouble, file = "", _open(path)
    for count in _chunks(size):
        part = torch.empty(count, dtype=torch.uint8)
        dist.recv(part, group=group, group_src=source)
        try:
            if not isinstance(file, str):
                file.write(_bytes(part))
        except OSError as error:
            trouble = _words(error, path)
    if isinstance(file, str):
        return file
    try:
        file.flush()
        os.fsync(file.fileno())
        file.close()
    except OSError as error:
        trouble = trouble or _words(error, path)
    return trouble


def _open(path: Path) -> BinaryIO | str:
    try:
        return path.open("wb")
    except OSError as error:
        return _words(error, path)


def _chunks(size: int) -> Iterator[int]:
    for begin in range(0, size, CHUNK_BYTES):
        yield min(CHUNK_BYTES, size - begin)


def _owner(name: str) -> int:
    """The rank that wrote a file: `__RANK_n.distcp`, and rank 0 all else."""
    parts = name.split("_")
    return int(parts[2]) if name.startswith("__") else 0


def _must_be_well(trouble: str) -> None:
    if trouble:
        raise UserError(f"the checkpoint cannot be brought to this host: {trouble}")


def _words(error: OSError, path: Path) -> str:
    return f"{error.strerror or error}: {error.filename or path}{free_words(path) if error.errno in FULL else ''}"
