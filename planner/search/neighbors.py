"""Compare a layout with the layouts that differ in one choice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from planner.cost.timing import Timer
from planner.facts.layout import SCHEDULE_NAMES, V_SCHEDULES
from planner.facts.spec import JobSpec
from planner.facts.spec_rules import can_trainer_run, find_keep_gathered_problems, find_problems
from planner.hardware.cluster import Cluster
from planner.search.layout_search import RECOMPUTES, Constraints, compute_needed_bytes, get_safe_capacity

GIB = 2**30
BARELY_FITS = "fits only within the margin of error"


class Neighbor(NamedTuple):
    """Layout that differs in one choice on the same number of ranks.

    `reason`: how it compares, or why it is invalid. `step_s` and `memory_bytes` are None if it is invalid.
    """

    change: str
    spec: JobSpec
    fits: bool
    step_s: float | None
    memory_bytes: int | None
    reason: str


def find_neighbors(spec: JobSpec, cluster: Cluster) -> list[Neighbor]:
    """Return every layout with one change, the fastest that fit first.

    Layouts that fit only within the margin of error follow.
    """
    timer, sure = Timer(cluster), get_safe_capacity(spec, cluster)
    here = timer.get_step(spec).step_s
    found = [_weigh(change, other, timer, sure, here) for change, other in _changes(spec)]
    return sorted(found, key=lambda n: (not n.fits, (n.memory_bytes or 0) > sure, n.step_s or float("inf")))


def find_allowed_neighbors(spec: JobSpec, cluster: Cluster, constraints: Constraints) -> list[Neighbor]:
    """Return the neighbors of a search result that the constraints of the search allow."""
    there = cluster.accelerator.memory_bytes
    room = min(there, constraints.max_memory_bytes or there)
    accelerator = cluster.accelerator.model_copy(update={"memory_bytes": room})
    near = find_neighbors(spec, cluster.model_copy(update={"accelerator": accelerator}))
    return [n for n in near if _allows(constraints, n)]


def _allows(constraints: Constraints, near: Neighbor) -> bool:
    layout = near.spec.layout
    piped = () if layout.pp > 1 else ("schedule", "virtual_stages")  # These fields apply only with a pipeline.
    if any(getattr(layout, name) != value for name, value in constraints.fixed.items() if name not in piped):
        return False
    if near.spec.micro_batch_size > constraints.max_micro_batch:
        return False
    return not constraints.runnable or near.step_s is None or can_trainer_run(near.spec)


def suggest_layouts(spec: JobSpec, cluster: Cluster, *, limit: int = 3) -> list[Neighbor]:
    """Return neighbors that fit if the layout does not fit."""
    if compute_needed_bytes(spec, cluster) <= cluster.accelerator.memory_bytes:
        return []
    return [n for n in find_neighbors(spec, cluster) if n.fits][:limit]


def _weigh(change: str, spec: JobSpec, timer: Timer, sure: int, here: float) -> Neighbor:
    broken = find_problems(spec)
    if broken:
        return Neighbor(change, spec, False, None, None, " ".join(p.message for p in broken))
    capacity = timer.cluster.accelerator.memory_bytes
    step, needed = timer.get_step(spec).step_s, compute_needed_bytes(spec, timer.cluster)
    if needed > capacity:
        reason = f"needs {needed / GIB:.1f} GiB of {capacity / GIB:.1f} GiB"
        return Neighbor(change, spec, False, step, needed, reason)
    share = step / here - 1
    word = "slower" if share > 0 else "faster"
    reason = "equally fast" if abs(share) < 0.0005 else f"{abs(share):.1%} {word}"
    barely = f", which {BARELY_FITS}" if needed > sure else ""
    return Neighbor(change, spec, True, step, needed, f"{reason}, {needed / GIB:.1f} GiB{barely}")


def _changes(spec: JobSpec) -> Iterator[tuple[str, JobSpec]]:
    """Yield (label, spec) per change.

    Changes are: a degree doubled or halved with dp, ZeRO stage, recompute, micro-batch, and schedule.
    """
    layout, train = spec.layout, spec.train
    for axis in ("tp", "pp", "cp"):
        degree = getattr(layout, axis)
        if layout.dp % 2 == 0:
            yield _with(spec, f"{axis} {degree * 2}, dp {layout.dp // 2}", {axis: degree * 2, "dp": layout.dp // 2})
        if degree % 2 == 0:
            yield _with(spec, f"{axis} {degree // 2}, dp {layout.dp * 2}", {axis: degree // 2, "dp": layout.dp * 2})
    for zero in range(4):
        if zero != layout.zero and layout.replica_ranks > 1:
            yield _with(spec, f"ZeRO-{zero}", {"zero": zero})
    for recompute in RECOMPUTES:
        if recompute != layout.recompute:
            yield _with(spec, f"recompute {recompute}", {"recompute": recompute})
    if layout.tp > 1 and not layout.sequence_parallel:
        yield _with(spec, "sequence parallel", {"sequence_parallel": True, "scatter_gather": False})
    if spec.micro_batch_size % 2 == 0:
        yield _with(spec, f"micro-batch {spec.micro_batch_size // 2}", {}, train.micro_batches * 2)
    if train.micro_batches % 2 == 0:
        yield _with(spec, f"micro-batch {spec.micro_batch_size * 2}", {}, train.micro_batches // 2)
    if layout.pp > 1:
        for schedule, chunks in (("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_zero_bubble", 1), ("zbv", 2)):
            if (schedule, chunks) != (layout.schedule, layout.virtual_stages):
                words = SCHEDULE_NAMES[schedule]
                yield _with(spec, words, {"schedule": schedule, "virtual_stages": chunks})


def _with(spec: JobSpec, words: str, layout: dict[str, Any], micro_batches: int | None = None) -> tuple[str, JobSpec]:
    """Return the changed spec, and reset fields that the change makes invalid."""
    fields: dict[str, Any] = {**layout}
    tp = fields.get("tp", spec.layout.tp)
    pp = fields.get("pp", spec.layout.pp)
    ranks = fields.get("dp", spec.layout.dp) * fields.get("cp", spec.layout.cp)
    if "tp" in fields:
        fields["sequence_parallel"] = tp > 1
    if tp == 1:
        fields["regather"] = False
    if tp == 1 or pp == 1 or fields.get("sequence_parallel", spec.layout.sequence_parallel):
        fields["scatter_gather"] = False
    if pp == 1:
        fields.update(virtual_stages=1, schedule="1f1b")
    if ranks == 1:
        fields.update(zero=0, dp_replicas=1)
    changed = spec.layout.model_copy(update=fields)
    fields["keep_gathered"] = changed.keep_gathered and not find_keep_gathered_problems(changed)
    if "dp" in fields:
        fields["dp_replicas"] = 1
    train = spec.train
    if micro_batches is None and "dp" in fields:
        # The micro-batch keeps its size if possible. Twice the replicas have half the micro-batches each.
        share = train.global_batch // fields["dp"]
        micro_batches = max(1, share // spec.micro_batch_size)
    if micro_batches is not None:
        train = train.model_copy(update={"micro_batches": micro_batches})
    return words, spec.model_copy(update={"layout": spec.layout.model_copy(update=fields), "train": train})


DEGREES = (1, 2, 4, 8)

OPTIONS: dict[str, tuple[Any, ...]] = {
    "dp": DEGREES,
    "pp": DEGREES,
    "tp": DEGREES,
    "cp": DEGREES,
    "ep": DEGREES,
    "zero": (0, 1, 2, 3),
    "sequence_parallel": (False, True),
    "schedule": tuple(SCHEDULE_NAMES),
    "recompute": ("none", "selective", "full"),
}
# chunks per stage of a chosen schedule
CHUNKS = {"interleaved_1f1b": 2, "looped_bfs": 2, **dict.fromkeys(V_SCHEDULES, 2)}


def find_impossible_options(spec: JobSpec) -> dict[str, dict[str, str]]:
    """Return {field: {option: reason}} for every layout option that adds a problem.

    The current option is never listed. Options that only lack slots are not listed either, because they can be planned.
    Keys are text.
    """
    already = {p.field for p in find_problems(spec)}
    impossible: dict[str, dict[str, str]] = {}
    for field, options in OPTIONS.items():
        for option in options:
            if option == getattr(spec.layout, field):
                continue
            update = {field: option}
            if field == "schedule" and spec.layout.pp > 1:
                update["virtual_stages"] = CHUNKS.get(option, 1)
            changed = spec.model_copy(update={"layout": spec.layout.model_copy(update=update)})
            added = [p for p in find_problems(changed) if p.field not in already]
            if added:
                impossible.setdefault(field, {})[str(option).lower()] = " ".join(p.message for p in added)
    return impossible
