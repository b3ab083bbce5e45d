"""Iterators of torch's DataLoader."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import dataloader

Next = Callable[[Any], Any]


class BatchSource(NamedTuple):
    """Where the batches of an iterator come from. None if unknown."""

    dataset: int  # identity
    batch_size: int | None  # samples per batch of this rank
    num_replicas: int | None  # ranks among which a distributed sampler divides the samples


def patch_next_batch(wrap: Callable[[Next], Next]) -> Callable[[], None]:
    """Let `wrap` replace the method that returns the next batch. The returned function restores the method."""
    owner: Any = dataloader._BaseDataLoaderIter
    original = owner.__next__
    owner.__next__ = functools.wraps(original)(wrap(original))

    def restore() -> None:
        owner.__next__ = original

    return restore


def get_batch_source(iterator: Any) -> BatchSource:
    """Return the source of an iterator's batches."""
    batches = iterator._index_sampler if iterator._auto_collation else None
    batch_size = getattr(batches, "batch_size", None)
    # A DistributedSampler has `num_replicas`. The batch sampler of accelerate has `num_processes`.
    num_replicas = getattr(getattr(batches, "sampler", None), "num_replicas", getattr(batches, "num_processes", None))
    return BatchSource(
        id(iterator._dataset),
        batch_size if isinstance(batch_size, int) else None,
        num_replicas if isinstance(num_replicas, int) else None,
    )
