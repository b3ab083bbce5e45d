"""The example of each collective on four ranks, for pages without a run. Values follow from the definition."""

from __future__ import annotations

from typing import Literal, NamedTuple

from planner.facts.collectives import LabRankValues, LabStep
from planner.facts.spec import LabPrimitive

RANKS = 4
# Microseconds at which each rank arrives at the barrier of the example. Only the order matters, so pages hide them.
ARRIVALS = (0.0, 30.0, 10.0, 20.0)
BARRIER_END = 34.0

Values = tuple[float, ...]


class Setting(NamedTuple):
    """The settings of a run that a picture depends on."""

    root: int = 0
    reduce_op: Literal["sum", "max"] = "sum"


SETTING = Setting()


def example(primitive: LabPrimitive) -> LabStep:
    """Return the tensors of each rank before and after the collective, with one element per rank and shard."""
    if primitive == "barrier":
        return _step(primitive, [((came,), (BARRIER_END,)) for came in ARRIVALS])
    ranks = range(RANKS)
    full = [tuple(100.0 * (rank + 1) + i for i in ranks) for rank in ranks]
    total = tuple(sum(row[i] for row in full) for i in ranks)
    first = tuple(row[0] for row in full)
    root = SETTING.root
    held: dict[LabPrimitive, list[tuple[Values | None, Values | None]]] = {
        "broadcast": [(full[r], full[root]) for r in ranks],
        "scatter": [(full[r] if r == root else None, (full[root][r],)) for r in ranks],
        "gather": [((full[r][0],), first if r == root else None) for r in ranks],
        "all_gather": [((full[r][0],), first) for r in ranks],
        "reduce": [(full[r], total if r == root else None) for r in ranks],
        "all_reduce": [(full[r], total) for r in ranks],
        "reduce_scatter": [(full[r], (total[r],)) for r in ranks],
        "all_to_all": [(full[r], tuple(row[r] for row in full)) for r in ranks],
        "send_recv": [(full[r], full[r - 1]) for r in ranks],
        "isend_irecv": [(full[r], full[r - 1]) for r in ranks],
    }
    return _step(primitive, held[primitive])


def _step(primitive: LabPrimitive, held: list[tuple[Values | None, Values | None]]) -> LabStep:
    holdings = tuple(LabRankValues(rank=rank, before=before, after=after) for rank, (before, after) in enumerate(held))
    return LabStep(primitive=primitive, holdings=holdings)
