"""Whether each rank trained on its own share of the step's batch, as rank 0's data has it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from contracts.telemetry.proof import Mismatch
from planner.facts.layout import coordinates
from planner.facts.spec import JobSpec
from workers.trainer.corpus.data import Corpus, Tokens
from workers.trainer.parallel.mesh import Mesh

FACTOR = 6364136223846793005  # odd (Knuth's MMIX)

Sums = npt.NDArray[np.int64]


def compare_rows(
    spec: JobSpec, mesh: Mesh, corpus: Corpus, rows: Tokens, index: int, device: torch.device
) -> list[Mismatch]:
    """All ranks call this together with what they trained on in step `index` (from 0), and all get the same answer."""
    wanted = torch.empty(spec.train.global_batch, dtype=torch.int64, device=device)
    if mesh.rank == 0:
        wanted = torch.from_numpy(_whole_batch(spec, corpus, index)).to(device)
    own = torch.from_numpy(row_sums(rows)).to(device)
    trained = own.unsqueeze(0)
    if mesh.layout.world_size > 1:
        dist.broadcast(wanted, 0)
        trained = own.new_empty((mesh.layout.world_size, len(own)))
        dist.all_gather_single(trained.flatten(), own)
    shares = wanted.view(spec.layout.dp, -1)
    wrong = []
    for rank, found in enumerate(trained):
        off = int((found != shares[coordinates(rank, spec.layout).dp]).sum())
        if off:
            name, apart = f"step {index + 1}", off / len(own)
            wrong.append(Mismatch(what="rows", name=name, axis="dp", ranks=[rank], apart=apart, limit=0.0))
    return wrong


def row_sums(rows: Tokens) -> Sums:
    """(rows,) a checksum of each: tokens times odd weights, modulo 2**64."""
    weights = np.cumprod(np.full(rows.shape[1], FACTOR, dtype=np.uint64))
    sums: Sums = (rows.astype(np.uint64) * weights).sum(1, dtype=np.uint64).view(np.int64)
    return sums


def _whole_batch(spec: JobSpec, corpus: Corpus, index: int) -> Sums:
    """Of every row of the step, one replica's share after the other."""
    train, share = spec.train, spec.train.global_batch // spec.layout.dp
    starts = range(0, train.global_batch, share)
    parts = [
        corpus.train_batch(train.seed, index, train.global_batch, slice(start, start + share), train.seq_len)
        for start in starts
    ]
    return np.concatenate([row_sums(part) for part in parts])
