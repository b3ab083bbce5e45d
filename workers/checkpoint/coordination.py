"""Run work on ranks that wait for each other, and report errors to all of them.

A rank can fail alone, for example if a disk is full or a file is unreadable. Then every rank raises the same error.
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

T = TypeVar("T")
MAX_ERROR_CHARS = 500  # characters


class DiskFullError(Exception):
    """Report a full disk. The text travels between ranks."""


@contextmanager
def report_disk_full(host: str, draft: Path, needed: int = 0, prefix: str = "") -> Iterator[None]:
    """Convert an error of a full disk to a `DiskFullError`.

    Args:
        host: name of this host.
        draft: folder of the checkpoint.
        needed: bytes to write to files that begin with `prefix`, or 0 if unknown.

    Raises:
        DiskFullError: if the disk is full.
    """
    try:
        yield
    except Exception as error:
        full = find_disk_full_error(error)
        if full is None:
            raise
        raise DiskFullError(format_disk_full(host, full, draft, _format_needed(draft, needed, prefix))) from error


class CheckpointWriter(FileSystemWriter):
    """Write the files of one rank, and report a full disk."""

    def __init__(self, draft: Path, rank: int, host: str) -> None:
        super().__init__(draft, sync_files=False)
        self._draft, self._prefix, self._host = draft, f"__{rank}_", host

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with report_disk_full(self._host, self._draft, get_planned_bytes(plan), self._prefix):
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with report_disk_full(self._host, self._draft):
            super().finish(metadata, results)


def get_planned_bytes(plan: SavePlan) -> int:
    """Return the bytes of the tensors that a rank writes, without file headers."""
    parts = [item.tensor_data for item in plan.items if item.tensor_data is not None]
    return sum(part.chunk.sizes.numel() * part.properties.dtype.itemsize for part in parts)


def _format_needed(draft: Path, needed: int, prefix: str) -> str:
    """What is there already takes of what is free."""
    if not needed:
        return ""
    stored_bytes = 0
    with suppress(OSError):
        stored_bytes = sum(path.stat().st_size for path in draft.glob(f"{prefix}*"))
    return f" needs at least {needed:,} bytes, but has {stored_bytes:,}"


class _RankResult(NamedTuple):
    """Store the result of one rank. `problem` is empty on success."""

    result: object
    problem: str


def run_on_every_rank(work: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """Run `work` on every rank, and return the results of all ranks.

    Raises:
        UserError: on all ranks, if the work failed on one rank.
    """
    prefix = _run_and_catch(work, None if group is None else group.rank())
    results: list[_RankResult] = [prefix]
    if group is not None:
        results = [prefix] * group.size()
        dist.all_gather_object(results, prefix, group=group)
    for one in results:
        if one.problem:
            raise UserError(one.problem)
    return [one.result for one in results]  # type: ignore[misc]  # without a problem it is what work gave


def run_on_first_rank(work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Run `work` on rank 0 of a group, and return its result on all ranks.

    Raises:
        UserError: on all ranks, if the work failed.
    """
    here = group is None or group.rank() == 0
    results: list[T | None] = run_on_every_rank(work if here else lambda: None, group)
    return cast(T, results[0])


def format_error(error: BaseException) -> str:
    """Format an error as one line of bounded length. Of several ranks, the first counts."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        return f"rank {rank}: {format_error(cause)}"
    if isinstance(error, (UserError, DiskFullError)):
        return str(error)[:MAX_ERROR_CHARS]
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    else:
        text = f"{type(error).__name__}: {error}"
    return " ".join(text.replace("\0", "").split())[:MAX_ERROR_CHARS]


def _run_and_catch(work: Callable[[], object], rank: int | None) -> _RankResult:
    try:
        return _RankResult(work(), "")
    except UserError as error:
        return _RankResult(None, format_error(error))
    except (Exception, CheckpointException) as error:
        return _RankResult(None, format_error(error) if rank is None else f"rank {rank}: {format_error(error)}")
