"""Whether all ranks that hold the same part of a tensor hold the same values.

Whether each rank trained on its own share of the step's batch, as rank 0's data has it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from contracts.telemetry.results import Mismatch
from planner.facts.layout import MESH_AXES, Coordinates, get_coordinates
from planner.facts.model_shapes import count_parameters
from planner.facts.spec import JobSpec
from workers.trainer.dataset import Corpus, Tokens
from workers.trainer.parallel.mesh import Mesh
from workers.trainer.verification.shards import FACTOR, Piece, checksum, names_by_number

Kind = Literal["gradient", "weight"]
ValueOf = Callable[[Piece], torch.Tensor]
Sums = dict[int, list[tuple[int, int]]]  # by part: ranks and their checksums, in the order of the ranks


class Compared(NamedTuple):
    """What a look at all ranks found. `apart`: the largest difference of two copies."""

    parts: int
    copied: int
    apart: float
    wrong: list[Mismatch]


def compare_copies(
    what: Kind,
    spec: JobSpec,
    mesh: Mesh,
    pieces: list[Piece],
    value_of: ValueOf,
    limit: float,
) -> Compared:
    """All ranks call this together, and all get the same answer."""
    device = value_of(pieces[0]).device if pieces else torch.device("cpu")
    sums, elements = _everybodys(mesh, _table(what, pieces, value_of, device))
    differing = {number: held for number, held in sums.items() if len({told for _, told in held}) > 1}
    looks = [value_of, _computed_with] if what == "weight" else [value_of]
    wrong: list[Mismatch] = []
    for number, held in sorted(differing.items()):
        rank = next(rank for rank, told in held if told != held[0][1])
        several = [_distance(mesh, pieces, look, number, elements[number], held, device) for look in looks]
        apart = None if None in several else max(found for found in several if found is not None)
        wrong.append(_apart(what, spec, number, held[0][0], rank, apart, limit))
    worst = max((w["apart"] for w in wrong if w["apart"] is not None), default=0.0)
    beyond = [w for w in wrong if w["apart"] is None or w["apart"] > limit]
    held_elements, all_elements = sum(elements.values()), count_parameters(spec.model)
    if held_elements != all_elements:
        beyond.append(_share(held_elements, all_elements))
    copied = sum(len(held) > 1 for held in sums.values())
    return Compared(len(sums), copied, worst, beyond)


def _computed_with(piece: Piece) -> torch.Tensor:
    return piece.weight if piece.computed_with is None else piece.computed_with


def _table(what: Kind, pieces: list[Piece], value_of: ValueOf, device: torch.device) -> torch.Tensor:
    """(parts, 3) int64: number, elements, checksum of what this rank holds."""
    rows = []
    for piece in pieces:
        value = value_of(piece)
        about = torch.tensor([piece.number, value.numel()], device=device)
        total = checksum(value)
        if what == "weight" and piece.computed_with is not None:
            total = total * FACTOR + checksum(piece.computed_with)
        rows.append(torch.cat((about, total.reshape(1))))
    return torch.stack(rows) if rows else torch.zeros((0, 3), dtype=torch.int64, device=device)


def _everybodys(mesh: Mesh, own: torch.Tensor) -> tuple[Sums, dict[int, int]]:
    """Checksums, and elements, by part over all ranks."""
    world = mesh.layout.world_size
    counts = torch.zeros(world, dtype=torch.int64, device=own.device)
    counts[mesh.rank] = len(own)
    if world > 1:
        dist.all_reduce(counts)
    most = int(counts.max())
    mine = torch.zeros((most, 3), dtype=torch.int64, device=own.device)
    mine[: len(own)] = own
    tables = mine.unsqueeze(0)
    if world > 1:
        tables = mine.new_empty((world, most, 3))
        dist.all_gather_single(tables.flatten(0, 1), mine)
    sums: Sums = defaultdict(list)
    elements: dict[int, int] = {}
    for rank, (table, count) in enumerate(zip(tables.tolist(), counts.tolist(), strict=True)):
        for number, size, told in table[:count]:
            sums[number].append((rank, told))
            elements[number] = size
    return sums, elements


def _distance(
    mesh: Mesh,
    pieces: list[Piece],
    value_of: ValueOf,
    number: int,
    elements: int,
    held: list[tuple[int, int]],
    device: torch.device,
) -> float | None:
    """The largest relative difference of any copy from the first rank's, which sends it to all; None for no number."""
    mine = [value_of(piece).flatten().float() for piece in pieces if piece.number == number]
    first = mine[0].clone() if mine else torch.empty(elements, device=device)
    if mesh.layout.world_size > 1:
        dist.broadcast(first, held[0][0])
    apart = torch.stack([rms_apart(own, first) for own in mine]).max() if mine else torch.zeros((), dtype=torch.float64)
    apart = apart.to(device).nan_to_num(torch.inf, posinf=torch.inf).reshape(1)
    if mesh.layout.world_size > 1:
        dist.all_reduce(apart, dist.ReduceOp.MAX)
    return float(apart) if torch.isfinite(apart) else None


def rms_apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """||a - b|| / ||b||, float64"""
    distance: torch.Tensor = (a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)
    return distance


def _apart(
    what: Kind,
    spec: JobSpec,
    number: int,
    first: int,
    rank: int,
    apart: float | None,
    limit: float,
) -> Mismatch:
    here, there = get_coordinates(rank, spec.layout), get_coordinates(first, spec.layout)
    name = dict(names_by_number(spec, here)).get(number, "a tensor")
    return Mismatch(what=what, name=name, axis=_axes(here, there), ranks=[rank, first], apart=apart, limit=limit)


def _axes(a: Coordinates, b: Coordinates) -> str:
    """Along which two places differ; of two copies on one rank, where a V ends, the pipe."""
    differing = [axis for axis in MESH_AXES if getattr(a, axis) != getattr(b, axis)]
    return " x ".join(differing) or "pp"


def _share(held: int, all_elements: int) -> Mismatch:
    name = f"the ranks hold {held:,} elements, but the model has {all_elements:,}"
    return Mismatch(
        what="share", name=name, axis="", ranks=[], apart=abs(held - all_elements) / all_elements, limit=0.0
    )


ROW_FACTOR = 6364136223846793005  # odd (Knuth's MMIX)

RowSums = npt.NDArray[np.int64]


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
        off = int((found != shares[get_coordinates(rank, spec.layout).dp]).sum())
        if off:
            name, apart = f"step {index + 1}", off / len(own)
            wrong.append(Mismatch(what="rows", name=name, axis="dp", ranks=[rank], apart=apart, limit=0.0))
    return wrong


def row_sums(rows: Tokens) -> RowSums:
    """(rows,) a checksum of each: tokens times odd weights, modulo 2**64."""
    weights = np.cumprod(np.full(rows.shape[1], ROW_FACTOR, dtype=np.uint64))
    sums: RowSums = (rows.astype(np.uint64) * weights).sum(1, dtype=np.uint64).view(np.int64)
    return sums


def _whole_batch(spec: JobSpec, corpus: Corpus, index: int) -> RowSums:
    """Of every row of the step, one replica's share after the other."""
    train, share = spec.train, spec.train.global_batch // spec.layout.dp
    starts = range(0, train.global_batch, share)
    parts = [
        corpus.train_batch(train.seed, index, train.global_batch, slice(start, start + share), train.seq_len)
        for start in starts
    ]
    return np.concatenate([row_sums(part) for part in parts])
