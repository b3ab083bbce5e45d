"""A save that a full disk cut short says so on the host whose disk it is, with what it needs and what is free.

Work that a rank can fail at by itself (a disk is full, a file cannot be read) while the others wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from workers.disk import find_disk_full_error, format_disk_full
from workers.trainer.errors import UserError


class NoRoomError(Exception):
    """A disk takes no more. Travels between ranks as its words."""


@contextmanager
def told_of(host: str, draft: Path, needed: int = 0, own: str = "") -> Iterator[None]:
    """`needed`: bytes that are written here at least, to files that begin with `own`; 0 where nobody knows.

    Raises:
        NoRoomError: in place of what says that the disk is full.
    """
    try:
        yield
    except Exception as error:
        full = find_disk_full_error(error)
        if full is None:
            raise
        raise NoRoomError(format_disk_full(host, full, draft, _needs(draft, needed, own))) from error


class Writer(FileSystemWriter):
    """Of one rank's files, on `host`."""

    def __init__(self, draft: Path, rank: int, host: str) -> None:
        super().__init__(draft, sync_files=False)
        self._draft, self._own, self._host = draft, f"__{rank}_", host

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with told_of(self._host, self._draft, planned_bytes(plan), self._own):
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with told_of(self._host, self._draft):
            super().finish(metadata, results)


def planned_bytes(plan: SavePlan) -> int:
    """Of the tensors that a rank writes, without what a file has beside them."""
    parts = [item.tensor_data for item in plan.items if item.tensor_data is not None]
    return sum(part.chunk.sizes.numel() * part.properties.dtype.itemsize for part in parts)


def _needs(draft: Path, needed: int, own: str) -> str:
    """What is there already takes of what is free."""
    if not needed:
        return ""
    there = 0
    with suppress(OSError):
        there = sum(path.stat().st_size for path in draft.glob(f"{own}*"))
    return f" needs at least {needed:,} bytes, but has {there:,}"


T = TypeVar("T")
MAX_WORDS = 500  # characters


class _Said(NamedTuple):
    """What came of the work on one rank. `problem` is empty where nothing was wrong."""

    result: object
    problem: str


def on_every_rank(work: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """What `work` gave on each rank. Whatever happens in it, every rank comes to hear of it.

    Raises:
        UserError: on all ranks when it failed on one, saying on which and how.
    """
    own = _tried(work, None if group is None else group.rank())
    said: list[_Said] = [own]
    if group is not None:
        said = [own] * group.size()
        dist.all_gather_object(said, own, group=group)
    for one in said:
        if one.problem:
            raise UserError(one.problem)
    return [one.result for one in said]  # type: ignore[misc]  # without a problem it is what work gave


def on_first_rank(work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """What `work` gives on rank 0 of a group, on all of them; it fails on all or none.

    Raises:
        UserError: as above.
    """
    here = group is None or group.rank() == 0
    given: list[T | None] = on_every_rank(work if here else lambda: None, group)
    return cast(T, given[0])


def words_of(error: BaseException) -> str:
    """A failure in one line of bounded length; of several ranks', the first's."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        return f"rank {rank}: {words_of(cause)}"
    if isinstance(error, (UserError, NoRoomError)):
        return str(error)[:MAX_WORDS]
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    else:
        text = f"{type(error).__name__}: {error}"
    return " ".join(text.replace("\0", "").split())[:MAX_WORDS]


def _tried(work: Callable[[], object], rank: int | None) -> _Said:
    try:
        return _Said(work(), "")
    except UserError as error:
        return _Said(None, words_of(error))
    except (Exception, CheckpointException) as error:
        return _Said(None, words_of(error) if rank is None else f"rank {rank}: {words_of(error)}")
