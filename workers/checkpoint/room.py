"""A save that a full disk cut short says so on the host whose disk it is, with what it needs and what is free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from workers.full import full_disk, no_room


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
        full = full_disk(error)
        if full is None:
            raise
        raise NoRoomError(no_room(host, full, draft, _needs(draft, needed, own))) from error


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
