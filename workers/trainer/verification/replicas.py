"""Shards of a rank with their checksums, and comparison of replicas and batches across ranks."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from contracts.telemetry.results import Mismatch
from planner.facts.layout import MESH_AXES, Coordinates, get_coordinates
from planner.facts.model_shapes import count_parameters
from planner.facts.placements import TensorBox, get_local_box
from planner.facts.spec import JobSpec, ModelSpec
from planner.facts.stages import get_stage_chunks, get_stage_units
from workers.trainer.dataset import TokenDataset, Tokens
from workers.trainer.model.decoder import get_full_name
from workers.trainer.parallel.mesh import Mesh
from workers.trainer.parallel.parallelize import ModelShard, ShardedParameter, get_local

BLOCK = 2**18  # elements per block, 2 MiB as int64
CHECKSUM_FACTOR = 6364136223846793005  # odd, so that the multiplication is invertible (Knuth, MMIX)
INT_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Kind = Literal["gradient", "weight"]
Sums = dict[int, list[tuple[int, int]]]  # by shard id: (rank, checksum), in the order of ranks
ROW_FACTOR = 6364136223846793005  # odd (Knuth's MMIX)
RowSums = npt.NDArray[np.int64]


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit checksum, (), int64: the sum of integers times odd weights, modulo 2**64.

    It detects a change of any single element, and other changes with probability 1 - 2**-64. NaNs are compared by bits.
    """
    integers = tensor.detach().contiguous().flatten().view(INT_DTYPES[tensor.element_size()])
    weights = _make_weights(integers.device)
    total = torch.zeros((), dtype=torch.int64, device=integers.device)
    for block in integers.split(BLOCK):
        total = total * CHECKSUM_FACTOR + (block.long() * weights[: len(block)]).sum()
    return total


@cache
def _make_weights(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randint(-(2**62), 2**62, (BLOCK,), generator=generator) | 1).to(device)


class TensorShard(NamedTuple):
    """Store a rank's shard of a tensor. Tied tensors have the name of the embedding."""

    name: str
    box: TensorBox
    parameter: ShardedParameter

    @property
    def number(self) -> int:
        """Return the id of the shard, the same on every rank with this shard."""
        return compute_shard_id(self.name, self.box)

    @property
    def gradient(self) -> torch.Tensor:
        """Return the gradient without padding."""
        return self.parameter.gradient[self.box.local_slices]

    @property
    def weight(self) -> torch.Tensor:
        """Return the tensor that the optimizer updates, without padding."""
        return get_local(self.parameter.master.detach())[self.box.local_slices]

    @property
    def computed_with(self) -> torch.Tensor | None:
        """Return the tensor that the model computes with, or None if it is the master itself."""
        if self.parameter.weight is self.parameter.master:
            return None
        return get_local(self.parameter.weight.detach())[self.box.local_slices]


def list_shards(spec: JobSpec, place: Coordinates, part: ModelShard) -> list[TensorShard]:
    """Return all shards of a rank that have elements."""
    found = [
        TensorShard(get_model_tensor_name(h.name, spec.model), get_local_box(spec, place, h.spec), h)
        for h in part.parameters
    ]
    return [piece for piece in found if piece.box.numel]


def iter_shard_names(spec: JobSpec, place: Coordinates) -> Iterator[tuple[int, str]]:
    """Yield (shard id, name) of the rank at `place`. Any rank can compute them."""
    for unit in get_stage_units(spec.model, get_stage_chunks(spec.model, spec.layout, place.pp)):
        for parameter in unit.parameters:
            name = get_model_tensor_name(get_full_name(unit, parameter), spec.model)
            yield compute_shard_id(name, get_local_box(spec, place, parameter)), name


def compute_shard_id(name: str, box: TensorBox) -> int:
    digest = hashlib.sha256(f"{name}/{box.offsets}/{box.sizes}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def get_model_tensor_name(name: str, model: ModelSpec) -> str:
    return "embedding.weight" if name == "head.weight" and model.tied_embeddings else name


GetValue = Callable[[TensorShard], torch.Tensor]


class ReplicaComparison(NamedTuple):
    """Store a comparison of replicas over all ranks. `apart` is the largest difference."""

    parts: int
    replicated: int
    apart: float
    wrong: list[Mismatch]


def compare_replicas(
    what: Kind,
    spec: JobSpec,
    mesh: Mesh,
    shards: list[TensorShard],
    get_value: GetValue,
    limit: float,
) -> ReplicaComparison:
    """Compare the replicas of all shards. All ranks call this together, and get the same result."""
    device = get_value(shards[0]).device if shards else torch.device("cpu")
    sums, elements = _gather_checksums(mesh, _make_table(what, shards, get_value, device))
    differing = {number: holders for number, holders in sums.items() if len({value for _, value in holders}) > 1}

    def get_computed_with(shard: TensorShard) -> torch.Tensor:
        return shard.weight if shard.computed_with is None else shard.computed_with

    getters = [get_value, get_computed_with] if what == "weight" else [get_value]
    wrong: list[Mismatch] = []
    for number, holders in sorted(differing.items()):
        rank = next(rank for rank, checksum_value in holders if checksum_value != holders[0][1])
        several = [
            _compute_difference(mesh, shards, getter, number, elements[number], holders, device) for getter in getters
        ]
        apart = None if None in several else max(found for found in several if found is not None)
        wrong.append(_make_mismatch(what, spec, number, holders[0][0], rank, apart, limit))
    worst = max((w["apart"] for w in wrong if w["apart"] is not None), default=0.0)
    beyond = [w for w in wrong if w["apart"] is None or w["apart"] > limit]
    held_elements, all_elements = sum(elements.values()), count_parameters(spec.model)
    if held_elements != all_elements:
        name = f"the ranks hold {held_elements:,} elements, but the model has {all_elements:,}"
        share = abs(held_elements - all_elements) / all_elements
        beyond.append(Mismatch(what="share", name=name, axis="", ranks=[], apart=share, limit=0.0))
    replicated = sum(len(holders) > 1 for holders in sums.values())
    return ReplicaComparison(len(sums), replicated, worst, beyond)


def _make_table(what: Kind, shards: list[TensorShard], get_value: GetValue, device: torch.device) -> torch.Tensor:
    """Return (shards, 3) int64: id, elements, checksum of each shard of this rank."""
    rows = []
    for shard in shards:
        value = get_value(shard)
        about = torch.tensor([shard.number, value.numel()], device=device)
        total = checksum(value)
        if what == "weight" and shard.computed_with is not None:
            total = total * CHECKSUM_FACTOR + checksum(shard.computed_with)
        rows.append(torch.cat((about, total.reshape(1))))
    return torch.stack(rows) if rows else torch.zeros((0, 3), dtype=torch.int64, device=device)


def _gather_checksums(mesh: Mesh, own: torch.Tensor) -> tuple[Sums, dict[int, int]]:
    """Return the checksums and the elements of all ranks by shard id."""
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
        for number, size, checksum_value in table[:count]:
            sums[number].append((rank, checksum_value))
            elements[number] = size
    return sums, elements


def _compute_difference(
    mesh: Mesh,
    shards: list[TensorShard],
    get_value: GetValue,
    number: int,
    elements: int,
    holders: list[tuple[int, int]],
    device: torch.device,
) -> float | None:
    """Return the largest relative difference from the first rank's replica, or None if not finite."""
    mine = [get_value(shard).flatten().float() for shard in shards if shard.number == number]
    first = mine[0].clone() if mine else torch.empty(elements, device=device)
    if mesh.layout.world_size > 1:
        dist.broadcast(first, holders[0][0])
    apart = torch.zeros((), dtype=torch.float64)
    if mine:  # ||a - b|| / ||b||
        scale = first.double().norm().clamp_min(1e-30)
        apart = torch.stack([(own.double() - first.double()).norm() / scale for own in mine]).max()
    apart = apart.to(device).nan_to_num(torch.inf, posinf=torch.inf).reshape(1)
    if mesh.layout.world_size > 1:
        dist.all_reduce(apart, dist.ReduceOp.MAX)
    return float(apart) if torch.isfinite(apart) else None


def _make_mismatch(
    what: Kind,
    spec: JobSpec,
    number: int,
    first: int,
    rank: int,
    apart: float | None,
    limit: float,
) -> Mismatch:
    here, there = get_coordinates(rank, spec.layout), get_coordinates(first, spec.layout)
    name = dict(iter_shard_names(spec, here)).get(number, "a tensor")
    # Two replicas on one rank of a V schedule differ in pp.
    axes = " x ".join(axis for axis in MESH_AXES if getattr(here, axis) != getattr(there, axis)) or "pp"
    return Mismatch(what=what, name=name, axis=axes, ranks=[rank, first], apart=apart, limit=limit)


def compare_batch_rows(
    spec: JobSpec, mesh: Mesh, corpus: TokenDataset, rows: Tokens, index: int, device: torch.device
) -> list[Mismatch]:
    """Compare the rows that each rank trained on with rank 0's data. All ranks call this together."""
    expected = torch.empty(spec.train.global_batch, dtype=torch.int64, device=device)
    if mesh.rank == 0:
        expected = torch.from_numpy(_compute_batch_checksums(spec, corpus, index)).to(device)
    own = torch.from_numpy(compute_row_checksums(rows)).to(device)
    trained = own.unsqueeze(0)
    if mesh.layout.world_size > 1:
        dist.broadcast(expected, 0)
        trained = own.new_empty((mesh.layout.world_size, len(own)))
        dist.all_gather_single(trained.flatten(), own)
    shares = expected.view(spec.layout.dp, -1)
    wrong = []
    for rank, found in enumerate(trained):
        wrong_rows = int((found != shares[get_coordinates(rank, spec.layout).dp]).sum())
        if wrong_rows:
            name, apart = f"step {index + 1}", wrong_rows / len(own)
            wrong.append(Mismatch(what="rows", name=name, axis="dp", ranks=[rank], apart=apart, limit=0.0))
    return wrong


def compute_row_checksums(rows: Tokens) -> RowSums:
    """Return the checksum of each row, (rows,): tokens times odd weights, modulo 2**64."""
    weights = np.cumprod(np.full(rows.shape[1], ROW_FACTOR, dtype=np.uint64))
    sums: RowSums = (rows.astype(np.uint64) * weights).sum(1, dtype=np.uint64).view(np.int64)
    return sums


def _compute_batch_checksums(spec: JobSpec, corpus: TokenDataset, index: int) -> RowSums:
    """Return the checksums of all rows of a step, replica by replica."""
    train, share = spec.train, spec.train.global_batch // spec.layout.dp
    starts = range(0, train.global_batch, share)
    parts = [
        corpus.train_batch(train.seed, index, train.global_batch, slice(start, start + share), train.seq_len)
        for start in starts
    ]
    return np.concatenate([compute_row_checksums(part) for part in parts])
