"""Search all layouts of a model on a cluster.

The search enumerates degrees, ZeRO stage, schedule, chunks, micro-batch size, and recompute. It rejects all layouts
with the same model state together if the model state does not fit, and predicts the time of all that fit.
tp is a power of two or a divisor of the node. Sequence parallelism is on if tp divides the sequence, because it sends
as many bytes and needs less memory (2205.05198 section 4.2.2). GPipe, naive, and looped BFS are searched only on
request: 1F1B and its interleaved form idle as long or less and need less memory.
"""

from __future__ import annotations

import gc
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from planner.cost.estimate import compute_allowance, use_cluster_device
from planner.cost.learning import (
    Interval,
    compute_memory_correction,
    compute_memory_interval,
    compute_time_interval,
    get_safe_peak_bytes,
)
from planner.cost.memory import get_max_bytes, get_min_bytes
from planner.cost.resolved_plan import ResolvedPlan, resolve
from planner.cost.stage_time import Timing
from planner.cost.timing import Timer
from planner.facts.layout import MAX_RANKS
from planner.facts.spec import JobSpec, Layout, Recompute, Schedule
from planner.facts.spec_rules import can_trainer_run, find_pipeline_problems, find_problems
from planner.facts.validation import Problem, SpecError, get_divisors
from planner.hardware.cluster import Cluster

MAX_CP = 64
MAX_MICRO_BATCH = 16
MIN_CP_TOKENS = 2048  # Minimum tokens per cp rank, unless cp is fixed.
SCHEDULES: tuple[tuple[Schedule, int], ...] = (
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 4),
    ("interleaved_zero_bubble", 1),
    ("zbv", 2),
    ("dualpipev", 2),
)
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
# With these schedules, larger micro-batches can need less memory.
RISING_SCHEDULES: tuple[Schedule, ...] = ("gpipe", "looped_bfs")
FIXABLE = ("dp", "pp", "tp", "cp", "ep", "zero", "schedule", "virtual_stages", "recompute", "sequence_parallel")


class Constraints(NamedTuple):
    """Constraints of a search.

    `fixed`: layout fields with their values; schedule and chunks apply only with a pipeline.
    `max_memory_bytes`: limit per rank, at most the device memory. `runnable`: only layouts that the trainer supports.
    `max_layouts`: number of layouts after which the search stops. It does not depend on the speed of the machine.
    """

    world_size: int
    fixed: Mapping[str, Any] = {}
    max_micro_batch: int = MAX_MICRO_BATCH
    max_memory_bytes: int | None = None
    runnable: bool = False
    max_layouts: float = math.inf


class FittingLayout(NamedTuple):
    """Layout that fits, with its predicted time and memory."""

    spec: JobSpec
    timing: Timing
    memory_bytes: int


class Margins(NamedTuple):
    """Margins of error of the time and the memory of a layout."""

    time: Interval
    memory: Interval


def compute_margins(found: Sequence[FittingLayout], cluster: Cluster) -> list[Margins]:
    """Return the margins of error of each layout."""
    timer, peaks = Timer(cluster), compute_memory_correction(cluster.runs)
    return [
        Margins(
            compute_time_interval(cluster, f.spec, timer.get_correction(f.spec), f.timing.host_share),
            compute_memory_interval(cluster, f.spec, peaks, f.memory_bytes),
        )
        for f in found
    ]


class LayoutSearchResult(NamedTuple):
    """Result of a search.

    `best`: sorted by time; layouts that fit only within the margin of error follow.
    `pareto`: layouts that need less memory than every faster layout. `refused`: number of layouts per reason.
    `considered`: number of estimated and refused layouts, of `total`.
    `complete`: False if `max_layouts` ended the search.
    """

    best: list[FittingLayout]
    pareto: list[FittingLayout]
    considered: int
    total: int
    fitting: int
    refused: dict[str, int]
    seconds: float
    complete: bool


def search(spec: JobSpec, cluster: Cluster, constraints: Constraints, *, limit: int = 20) -> LayoutSearchResult:
    """Rank all layouts of the model and batch of `spec` on a number of ranks.

    Raises:
        SpecError: If a constraint is invalid.
    """
    check_constraints(constraints)
    started = time.perf_counter()
    finder = _Finder(spec, cluster, constraints)
    with paused_collection():
        fitting = sorted(finder.find(), key=_rank)
    sure = get_safe_capacity(spec, cluster, finder.capacity)
    return LayoutSearchResult(
        best=sorted(fitting, key=lambda found: found.memory_bytes > sure)[:limit],
        pareto=find_pareto_front(fitting),
        considered=finder.considered,
        total=finder.total,
        fitting=len(fitting),
        refused=dict(finder.refused),
        seconds=time.perf_counter() - started,
        complete=not finder.is_stopped,
    )


@contextmanager
def paused_collection() -> Iterator[None]:
    """Pause the cyclic garbage collector: a search keeps many tuples and no cycles, and scans cost 15% of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _rank(found: FittingLayout) -> tuple[float, int, int, int]:
    """Return the sort key: time, then memory, then number of axes and chunks."""
    x = found.spec.layout
    axes = sum(degree > 1 for degree in (x.tp, x.cp, x.pp, x.ep))
    return float(f"{found.timing.step_s:.4g}"), found.memory_bytes, axes, x.virtual_stages


def check_constraints(constraints: Constraints) -> None:
    """Reject constraints with unknown fields or invalid numbers.

    Raises:
        SpecError: With every problem.
    """
    found = []
    if not 1 <= constraints.world_size <= MAX_RANKS:
        found.append(Problem("world_size", f"`world_size` is {constraints.world_size}. Use 1 to {MAX_RANKS}."))
    if constraints.max_micro_batch < 1:
        found.append(Problem("max_micro_batch", f"`max_micro_batch` is {constraints.max_micro_batch}. Use at least 1."))
    unknown = [name for name in constraints.fixed if name not in FIXABLE]
    use = f"Use one of {', '.join(FIXABLE)}."
    found += [Problem(f"fixed.{name}", f"`fixed.{name}` is not supported. {use}") for name in unknown]
    if found:
        raise SpecError(found)


def find_pareto_front(fitting: Sequence[FittingLayout]) -> list[FittingLayout]:
    """Return the layouts that need less memory than every faster one."""
    front: list[FittingLayout] = []
    for found in fitting:
        if not front or found.memory_bytes < front[-1].memory_bytes:
            front.append(found)
    return front


def get_safe_capacity(spec: JobSpec, cluster: Cluster, room: int | None = None) -> int:
    """Return the highest predicted peak that fits even with its margin of error."""
    there = cluster.accelerator.memory_bytes if room is None else room
    return get_safe_peak_bytes(cluster, spec, compute_memory_correction(cluster.runs), there)


def compute_needed_bytes(spec: JobSpec, cluster: Cluster) -> int:
    """Memory of the fullest rank with its allowances."""
    plan = resolve(use_cluster_device(cluster, spec))
    return _allowed(plan, max(get_max_bytes(plan, stages) for stages in plan.partition.equal_stages), cluster)


def _allowed(spec: ResolvedPlan, parts: int, cluster: Cluster) -> int:
    return parts + compute_allowance(spec, cluster, parts)


class _Finder:
    """State of one search: remaining choices, and the number of layouts per reason."""

    def __init__(self, spec: JobSpec, cluster: Cluster, constraints: Constraints) -> None:
        self.spec, self.cluster, self.constraints = spec, cluster, constraints
        max_bytes, there = constraints.max_memory_bytes, cluster.accelerator.memory_bytes
        self.capacity = there if max_bytes is None else min(there, max_bytes)
        self.timer = Timer(cluster)
        self.refused: Counter[str] = Counter()
        self._first: dict[str, str] = {}  # First message per field
        self.is_stopped = False  # by `max_layouts`
        self.total = 0
        self._num_fitting = 0

    @property
    def considered(self) -> int:
        """Return the number of layouts that were estimated or refused."""
        return self._num_fitting + self.refused.total()

    def find(self) -> Iterator[FittingLayout]:
        """Yield layouts that fit, the most promising degrees first."""
        found = sorted(self._degrees(), key=self._promise)
        self.total = self.refused.total() + sum(self._count_layouts(degrees) for degrees in found)
        for degrees in found:
            shares = degrees["dp"] * degrees["cp"] > 1
            for zero in self._options("zero", (0, 1, 2, 3) if shares else (0,)):
                if zero and not shares:
                    self.refused["ZeRO needs dp or cp of 2 or more"] += 1
                    continue
                for schedule, chunks in self._schedules(degrees["pp"]):
                    if self.considered >= self.constraints.max_layouts:
                        self.is_stopped = True
                        return
                    yield from self._family({**degrees, "zero": zero}, schedule, chunks)

    def _count_layouts(self, degrees: dict[str, Any]) -> int:
        """Return the number of layouts with these degrees. A ZeRO stage without shards is one refused layout."""
        shares = degrees["dp"] * degrees["cp"] > 1
        stages = self._options("zero", (0, 1, 2, 3) if shares else (0,))
        refused = 0 if shares else sum(zero > 0 for zero in stages)
        sizes, policies = self._micro_batch_sizes(degrees["dp"]), self._options("recompute", RECOMPUTES)
        schedules = sum(1 for _ in self._schedules(degrees["pp"]))
        return refused + (len(stages) - refused) * schedules * len(sizes) * len(policies)

    def _promise(self, degrees: dict[str, Any]) -> float:
        """Return the step time of these degrees with default values of other fields."""
        sharded = 1 if degrees["dp"] * degrees["cp"] > 1 else 0
        fields = {**_PLAIN, **degrees, "zero": sharded, "recompute": "selective"}
        layout = self.spec.layout.model_copy(update=fields)
        return self.timer.get_step(self._candidate(layout, 1)).step_s

    def _options(self, field: str, usual: Sequence[Any]) -> Sequence[Any]:
        return (self.constraints.fixed[field],) if field in self.constraints.fixed else usual

    def _degrees(self) -> Iterator[dict[str, Any]]:
        """Yield valid degrees whose product is the world size."""
        model, train, world = self.spec.model, self.spec.train, self.constraints.world_size
        largest_cp = min(MAX_CP, max(1, train.seq_len // MIN_CP_TOKENS))
        experts = get_divisors(model.moe.num_experts) if model.moe else [1]
        shares, node = get_divisors(world), min(world, self.cluster.per_node)
        # Other degrees spread unevenly over nodes, and make large searches take 50% longer.
        inside = [t for t in shares if t <= node and (node % t == 0 or t.bit_count() == 1)]
        for tp in self._options("tp", inside):
            for cp in self._options("cp", [c for c in shares if c <= largest_cp]):
                even = tp > 1 and train.seq_len % (tp * cp) == 0
                [sequence_parallel] = self._options("sequence_parallel", (even,))
                for pp in self._options("pp", [p for p in shares if p <= model.num_layers]):
                    dp, rest = divmod(world, tp * cp * pp)
                    if rest or dp < 1 or self.constraints.fixed.get("dp", dp) != dp:
                        continue
                    for ep in self._options("ep", [e for e in experts if dp * cp % e == 0]):
                        degrees = {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "ep": ep}
                        degrees["sequence_parallel"] = sequence_parallel
                        if self._divides(degrees):
                            yield degrees

    def _divides(self, degrees: dict[str, Any]) -> bool:
        """Return whether the degrees break no rule, without schedule and micro-batches."""
        layout = self.spec.layout.model_copy(update={**_PLAIN, **degrees})
        train = self.spec.train.model_copy(update={"micro_batches": 1})
        trial = self.spec.model_copy(update={"layout": layout, "train": train})
        found = [p for p in find_problems(trial) if p.field not in ("train.micro_batches", "layout.zero")]
        if found:
            field, message = found[0].field, found[0].message
            self.refused[f"{field}, for example {self._first.setdefault(field, message)}"] += 1
        return not found

    def _schedules(self, pp: int) -> Iterator[tuple[Schedule, int]]:
        fixed = self.constraints.fixed
        if pp == 1:
            yield "1f1b", 1
            return
        wanted = [(s, v) for s, v in SCHEDULES if fixed.get("schedule", s) == s]
        if not wanted:
            wanted = [(fixed["schedule"], v) for v in ((2, 4) if fixed["schedule"] == "looped_bfs" else (1,))]
        if "virtual_stages" in fixed:
            wanted = sorted({(s, fixed["virtual_stages"]) for s, _ in wanted})
        yield from ((s, v) for s, v in wanted if pp * v <= self.spec.model.num_layers)

    def _family(self, degrees: dict[str, Any], schedule: Schedule, chunks: int) -> Iterator[FittingLayout]:
        """Yield micro-batch sizes and recompute policies of layouts with equal model state."""
        fields = {**degrees, "schedule": schedule, "virtual_stages": chunks}
        sizes = self._micro_batch_sizes(degrees["dp"])
        policies = self._options("recompute", RECOMPUTES)
        layouts = [self.spec.layout.model_copy(update={**_PLAIN, **fields, "recompute": r}) for r in policies]
        first = self._candidate(layouts[0], sizes[0])
        plan = resolve(use_cluster_device(self.cluster, first))
        least = max(get_min_bytes(plan, stages[0]) for stages in plan.partition.equal_stages)
        if _allowed(plan, least, self.cluster) > self.capacity:
            self.refused["memory: model state does not fit"] += len(sizes) * len(layouts)
            return
        full: set[Recompute] = set()  # Policies that did not fit with a smaller micro-batch.
        for size in sizes:
            spec = self._candidate(layouts[0], size)
            if _breaks_schedule(spec):
                self.refused["schedule: too few micro-batches, or not a multiple of pp"] += len(layouts)
                continue
            for layout in layouts:
                trial = spec.model_copy(update={"layout": layout})
                plan = resolve(use_cluster_device(self.cluster, trial))
                # With as many in flight, larger micro-batches need more.
                surely = layout.recompute in full and trial.train.micro_batches >= 2 * layout.pp
                needed = self.capacity + 1 if surely else self._needed(plan)
                if needed > self.capacity:
                    self.refused["memory: activations do not fit"] += 1
                    full |= {layout.recompute} if schedule not in RISING_SCHEDULES else set()
                elif self.constraints.runnable and not can_trainer_run(trial):
                    self.refused["not supported by the trainer"] += 1
                else:
                    timed = plan if plan.spec is trial else resolve(trial)
                    self._num_fitting += 1
                    yield FittingLayout(trial, self.timer.get_step(timed), needed)

    def _needed(self, plan: ResolvedPlan) -> int:
        """Of the fullest rank, or of the first beyond what there is: one of each kind is asked before all are."""
        needed, alike = 0, plan.partition.equal_stages
        for stages in [*((stages[0],) for stages in alike), *(stages for stages in alike if len(stages) > 1)]:
            needed = max(needed, _allowed(plan, get_max_bytes(plan, stages, self.capacity), self.cluster))
            if needed > self.capacity:
                break
        return needed

    def _candidate(self, layout: Layout, micro_batch: int) -> JobSpec:
        train = self.spec.train
        m = train.global_batch // (layout.dp * micro_batch)
        return self.spec.model_copy(update={"layout": layout, "train": train.model_copy(update={"micro_batches": m})})

    def _micro_batch_sizes(self, dp: int) -> list[int]:
        share = self.spec.train.global_batch // dp
        return [b for b in range(1, min(self.constraints.max_micro_batch, share) + 1) if share % b == 0]


_PLAIN: dict[str, Any] = {
    "dp_replicas": 1,
    "regather": False,
    "keep_gathered": False,
    "scatter_gather": False,
    "virtual_stages": 1,
    "schedule": "1f1b",
    "zero": 0,
    "recompute": "none",
}


def _breaks_schedule(spec: JobSpec) -> bool:
    return bool(find_pipeline_problems(spec))
