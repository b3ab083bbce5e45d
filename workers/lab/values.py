"""What every rank holds and what it must hold afterwards, known from (rank, index) without any communication."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch

from planner.facts.collectives import LARGEST_EXACT
from planner.facts.spec import LabDtype, LabPrimitive

Fill = Callable[[int, torch.Tensor], torch.Tensor]  # rank of the job, indices -> whole numbers
MAX_MODULUS = 65521
BLOCK_ELEMENTS = (
    2**20
)  # elements that are computed at once: a whole buffer's in int64 would be several times the buffer
RANK_STRIDE, INDEX_STRIDE = 7919, 104_729  # primes, so that neither vanishes in a smaller prime modulus


class RankContext(NamedTuple):
    """Where this rank stands. `me` and `root` are places in the group; `ranks` are the job's, in the group's order."""

    ranks: tuple[int, ...]
    me: int
    root: int
    device: torch.device
    dtype: torch.dtype
    reduce_op: Literal["sum", "max"]
    fill: Fill

    @property
    def size(self) -> int:
        return len(self.ranks)


def build_pattern(dtype: LabDtype, group_size: int) -> Fill:
    """Values that differ by rank and by index, so small that the sum over all ranks is exact in `dtype`."""
    modulus = _prime_up_to(min(MAX_MODULUS, LARGEST_EXACT[dtype] // group_size + 1))

    def fill(rank: int, index: torch.Tensor) -> torch.Tensor:
        return (rank * RANK_STRIDE + index * INDEX_STRIDE) % modulus

    return fill


def fill_readable(rank: int, index: torch.Tensor) -> torch.Tensor:
    """Hundreds tell the rank, from 1, and the rest the element. A sum over ranks is never a value of one of them."""
    return 100 * (rank + 1) + index


def build_input(primitive: LabPrimitive, setting: RankContext, full: int) -> torch.Tensor | None:
    """What this rank hands over of a full buffer of so many elements; None where it hands over nothing."""
    if primitive == "barrier" or (primitive == "scatter" and setting.me != setting.root):
        return None
    count = full // setting.size if primitive in ("gather", "all_gather") else full
    return _data(setting, setting.me, 0, count)


def build_expected(primitive: LabPrimitive, setting: RankContext, full: int) -> torch.Tensor | None:
    """What this rank must hold afterwards; None where nothing is promised."""
    me, root, share = setting.me, setting.root, full // setting.size
    if primitive == "barrier" or (primitive in ("gather", "reduce") and me != root):
        return None
    if primitive == "broadcast":
        return _data(setting, root, 0, full)
    if primitive == "scatter":
        return _data(setting, root, me * share, share)
    if primitive in ("gather", "all_gather", "all_to_all"):
        return _of_every_place(setting, me * share if primitive == "all_to_all" else 0, share)
    if primitive in ("send_recv", "isend_irecv"):
        return _data(setting, (me - 1) % setting.size, 0, full)
    first, count = (me * share, share) if primitive == "reduce_scatter" else (0, full)
    return _reduced(setting, first, count)


def count_mismatches(found: torch.Tensor | None, wanted: torch.Tensor | None) -> int:
    """Elements that are not what they should be; none are where nothing is promised. NaN is always wrong."""
    if wanted is None:
        return 0
    if found is None or found.shape != wanted.shape:
        return wanted.numel()
    starts = range(0, wanted.numel(), BLOCK_ELEMENTS)
    return int(sum((found[at : at + BLOCK_ELEMENTS] != wanted[at : at + BLOCK_ELEMENTS]).sum() for at in starts))


def _data(setting: RankContext, place: int, first: int, count: int) -> torch.Tensor:
    return _filled(_empty(setting, count), partial(_placed, setting, place, first))


def _of_every_place(setting: RankContext, first: int, share: int) -> torch.Tensor:
    whole = _empty(setting, setting.size * share)
    for place, part in enumerate(whole.chunk(setting.size)):
        _filled(part, partial(_placed, setting, place, first))
    return whole


def _reduced(setting: RankContext, first: int, count: int) -> torch.Tensor:
    return _filled(_empty(setting, count), lambda at, some: _total(setting, first + at, some))


def _total(setting: RankContext, first: int, count: int) -> torch.Tensor:
    total = _numbers(setting, 0, first, count)
    for place in range(1, setting.size):
        more = _numbers(setting, place, first, count)
        total = total + more if setting.reduce_op == "sum" else torch.maximum(total, more)
    return total


def _placed(setting: RankContext, place: int, first: int, at: int, count: int) -> torch.Tensor:
    return _numbers(setting, place, first + at, count)


def _numbers(setting: RankContext, place: int, first: int, count: int) -> torch.Tensor:
    return setting.fill(setting.ranks[place], torch.arange(first, first + count, device=setting.device))


def _empty(setting: RankContext, count: int) -> torch.Tensor:
    return torch.empty(count, dtype=setting.dtype, device=setting.device)


def _filled(into: torch.Tensor, numbers: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
    """Block by block; `numbers` has a first element's place and how many follow."""
    for at in range(0, into.numel(), BLOCK_ELEMENTS):
        some = min(BLOCK_ELEMENTS, into.numel() - at)
        into[at : at + some] = numbers(at, some)
    return into


def _prime_up_to(limit: int) -> int:
    return next(n for n in range(limit, 1, -1) if all(n % d for d in range(2, int(n**0.5) + 1)))
