"""Who sends to whom: bytes from each rank to each other in one step."""

from __future__ import annotations

from planner.cost.resolved_plan import ResolvedPlan, resolve
from planner.cost.traffic import Collective, step_traffic
from planner.cost.traffic.pipeline import boundary_bytes
from planner.facts.collectives import compute_algorithmic_bytes
from planner.facts.layout import get_axis_ranks, get_chunk_indices, get_coordinates, get_num_chunks
from planner.facts.spec import JobSpec, Layout

MOST_RANKS = 64


def traffic_matrix(spec: JobSpec) -> list[list[int]] | None:
    """[sender][receiver] algorithmic bytes of a step, None for more ranks than a picture can show.

    A ring passes all its bytes to the next rank of the group, an all-to-all as many to each; the pipeline's messages go
    to the neighbouring stages.
    """
    layout = spec.layout
    world = layout.world_size
    if world > MOST_RANKS:
        return None
    plan = resolve(spec)
    matrix = [[0] * world for _ in range(world)]
    for rank in range(world):
        for row in step_traffic(plan, rank):
            if row.op in ("recv", "barrier"):
                continue
            for receiver, num_bytes in _receivers(plan, row, rank):
                matrix[rank][receiver] += num_bytes
    return matrix


def _receivers(plan: ResolvedPlan, row: Collective, rank: int) -> list[tuple[int, int]]:
    if row.op == "send" and row.axis == "pp":
        return _stages(plan, rank)
    group = _group(row, rank, plan.layout)
    here = group.index(rank)
    sent = compute_algorithmic_bytes(row.op, row.payload_bytes, row.group_size)
    if row.op == "all_to_all":
        others = [r for r in group if r != rank]
        return [(r, sent // len(others)) for r in others]
    return [(group[(here + 1) % len(group)], sent)]


def _group(row: Collective, rank: int, layout: Layout) -> list[int]:
    """The ranks of the collective that `rank` takes part in: `group_size` of them, `stride` apart."""
    if row.axis == "pp":  # the tied table's: the ends of the pipe
        pipe = get_axis_ranks(rank, "pp", layout)
        return [pipe[0], pipe[-1]]
    span = row.group_size * row.stride
    first = rank // span * span + rank % row.stride
    return [first + i * row.stride for i in range(row.group_size)]


def _stages(plan: ResolvedPlan, rank: int) -> list[tuple[int, int]]:
    """Hidden states to the stage after each chunk, gradients to the one before."""
    layout, place = plan.layout, get_coordinates(rank, plan.layout)
    pipe = get_axis_ranks(rank, "pp", layout)
    owner = {c: stage for stage in range(layout.pp) for c in get_chunk_indices(layout, stage)}
    size = plan.train.micro_batches * boundary_bytes(plan)
    near = [n for chunk in get_chunk_indices(layout, place.pp) for n in (chunk + 1, chunk - 1)]
    return [(pipe[owner[n]], size) for n in near if 0 <= n < get_num_chunks(layout) and owner[n] != place.pp]
