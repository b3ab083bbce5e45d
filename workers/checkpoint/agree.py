"""Work that a rank can fail at by itself (a disk is full, a file cannot be read) while the others wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from workers.checkpoint.room import NoRoomError
from workers.trainer.errors import UserError

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
