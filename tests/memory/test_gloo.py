"""Check the copies that gloo makes of tensors, in gloo, in dry runs, and in plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from planner.facts.parse_spec import parse_fields
from tests.memory.compare import compare_stages
from tests.memory.test_memory import MODEL
from workers.dry_run import STAGED_OPS
from workers.trainer.memory import PeakMemory

ELEMENTS = 2**24
WHOLE = 4 * ELEMENTS
CALLS: dict[str, Callable[[dist.ProcessGroupGloo, torch.Tensor, torch.Tensor], dist.Work]] = {
    "all_gather": lambda group, whole, part: group._allgather_base(whole, part),  # type: ignore[attr-defined]
    "reduce_scatter": lambda group, whole, part: group._reduce_scatter_base(part, whole),  # type: ignore[attr-defined]
    "all_reduce": lambda group, whole, _part: group.allreduce([whole]),  # type: ignore[attr-defined]
    "all_to_all": lambda group, whole, part: group.alltoall_base(whole[: len(part)], part, [], []),  # type: ignore[attr-defined]
    "broadcast": lambda group, whole, _part: group.broadcast(whole, 0),  # type: ignore[attr-defined]
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[tuple[ThreadPoolExecutor, list[dist.ProcessGroupGloo]]]:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        make: Any = lambda rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))  # noqa: E731
        yield pool, list(pool.map(make, range(2)))


@pytest.mark.parametrize("op", CALLS)
def test_gloo_copies_tensors_in_gather_and_reduce_scatter(
    op: str, ranks: tuple[ThreadPoolExecutor, list[dist.ProcessGroupGloo]]
) -> None:
    """Run two threads of one process as ranks, so that it has the copies of both."""
    pool, groups = ranks
    tensors = [(torch.ones(ELEMENTS), torch.ones(ELEMENTS // 2)) for _ in groups]
    peak = PeakMemory(torch.device("cpu"))
    list(pool.map(lambda group, arguments: CALLS[op](group, *arguments).wait(), groups, tensors))
    copied = 2 * WHOLE if op in STAGED_OPS else 0
    assert peak.read() == pytest.approx(copied, abs=WHOLE // 4)


@pytest.mark.parametrize(
    ("layout", "device"),
    [
        ({"dp": 2, "zero": 3}, "cpu"),
        ({"dp": 2, "zero": 3}, "cuda"),
        ({"tp": 4, "sequence_parallel": True, "regather": True, "recompute": "selective"}, "cpu"),
    ],
)
def test_plan_includes_the_copy_of_gloo(layout: dict[str, Any], device: str) -> None:
    """Check ZeRO-3 on a CPU, where the copy of an embedding and a head is 125 MiB."""
    model = {**MODEL, "num_layers": 1, "vocab_size": 512 if "tp" in layout else 32_000}
    train = {"global_batch": 4, "micro_batches": 2, "seq_len": 512, "precision": "bf16"}
    fields = {"model": model, "layout": layout, "train": train, "resources": {"device": device}}
    (only,) = compare_stages(parse_fields(fields))
    assert only.error == pytest.approx(0.0, abs=0.004)


def test_16_bit_shard_exists_next_to_the_copy() -> None:
    """Check a first stage, whose backward gathers the embedding at the peak: 3.2%."""
    model = {**MODEL, "arch": "gpt", "num_layers": 4, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 8}
    layout = {"pp": 2, "dp": 2, "zero": 3}
    train = {"global_batch": 4, "micro_batches": 2, "seq_len": 512, "precision": "bf16"}
    first, last = compare_stages(parse_fields({"model": model, "layout": layout, "train": train}))
    assert (first.error, last.error) == (pytest.approx(0.0, abs=0.002), pytest.approx(0.0, abs=0.002))
