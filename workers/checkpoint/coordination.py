"""Run work on ranks that wait for each other, and report errors to all of them.

A rank can fail alone, for example if a disk is full or a file is unreadable. Then every rank raises the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar, cast

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


class CheckpointDiskFullError(Exception):
    """Report a full disk. The text travels between ranks."""


@contextmanager
def report_disk_full(host: str, draft: Path, needed: int = 0, prefix: str = "") -> Iterator[None]:
    """Convert an error of a full disk to a `CheckpointDiskFullError`.

    Args:
        host: name of this host.
        draft: folder of the checkpoint.
        needed: bytes to write to files that begin with `prefix`, or 0 if unknown.

    Raises:
        CheckpointDiskFullError: if the disk is full.
    """
    try:
        yield
    except Exception as error:
        full = find_disk_full_error(error)
        if full is None:
            raise
        needs = ""
        if needed:
            stored_bytes = 0
            with suppress(OSError):
                stored_bytes = sum(path.stat().st_size for path in draft.glob(f"{prefix}*"))
            needs = f" needs at least {needed:,} bytes, but has {stored_bytes:,}"
        raise CheckpointDiskFullError(format_disk_full(host, full, draft, needs)) from error


class CheckpointWriter(FileSystemWriter):
    """Write the files of one rank, and report a full disk."""

    def __init__(self, draft: Path, rank: int, host: str) -> None:
        super().__init__(draft, sync_files=False)
        self._draft, self._prefix, self._host = draft, f"__{rank}_", host

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        parts = [item.tensor_data for item in plan.items if item.tensor_data is not None]
        tensor_bytes = sum(part.chunk.sizes.numel() * part.properties.dtype.itemsize for part in parts)
        with report_disk_full(self._host, self._draft, tensor_bytes, self._prefix):
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with report_disk_full(self._host, self._draft):
            super().finish(metadata, results)


def run_on_every_rank(work: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """Run `work` on every rank, and return the results of all ranks. Raises UserError."""
    result: T | None = None
    problem = ""
    try:
        result = work()
    except UserError as error:
        problem = format_error(error)
    except (Exception, CheckpointException) as error:
        problem = format_error(error) if group is None else f"rank {group.rank()}: {format_error(error)}"
    results = [(result, problem)] * (1 if group is None else group.size())
    if group is not None:
        dist.all_gather_object(results, (result, problem), group=group)
    for _, problem in results:
        if problem:
            raise UserError(problem)
    return [cast(T, result) for result, _ in results]


def run_on_first_rank(work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Run `work` on rank 0 of a group, and return its result on all ranks. Raises UserError."""
    here = group is None or group.rank() == 0
    results: list[T | None] = run_on_every_rank(work if here else lambda: None, group)
    return cast(T, results[0])


def format_error(error: BaseException) -> str:
    """Format an error as one line of bounded length. Of several ranks, the first counts."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        return f"rank {rank}: {format_error(cause)}"
    if isinstance(error, (UserError, CheckpointDiskFullError)):
        return str(error)[:MAX_ERROR_CHARS]
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    else:
        text = f"{type(error).__name__}: {error}"
    return " ".join(text.replace("\0", "").split())[:MAX_ERROR_CHARS]
