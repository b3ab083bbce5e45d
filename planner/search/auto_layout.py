"""Replace `layout: "auto"` with the fastest layout that fits."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

from pydantic import Field, ValidationError
from typing_extensions import TypedDict

from planner.cost.learning import compute_memory_correction, compute_time_interval, get_safe_peak_bytes
from planner.cost.timing import Timer
from planner.facts.kinds import get_kind_rules, round_down
from planner.facts.layout import MAX_RANKS, SCHEDULE_NAMES
from planner.facts.parse_spec import LayoutDict, SchemaFrom, convert_error, parse_fields
from planner.facts.spec import Degree, JobSpec, Recompute, Schedule
from planner.facts.spec_rules import find_problems
from planner.facts.validation import NO_NUL, Problem, SpecError, StrictModel, format_count, get_divisors
from planner.hardware.cluster import Cluster
from planner.search.layout_search import FIXABLE, Constraints, FittingLayout, search


class HostCapacity(NamedTuple):
    """Host capacity: number of slots, and memory per slot."""

    slots: int
    memory_bytes: int


class HostGang(NamedTuple):
    """Hosts of one model that a job can span: slots per host, and the least memory."""

    sizes: tuple[int, ...]
    memory_bytes: int

    def fits(self, ranks: int, tp: int) -> bool:
        """Return whether the ranks fit with each tensor-parallel group inside a host."""
        return sum(round_down(slots, tp) for slots in self.sizes) >= ranks


class Capacity(NamedTuple):
    """All capacity. `alone` has at least one host."""

    hosts: Sequence[HostCapacity]
    gangs: Sequence[HostGang] = ()

    @property
    def max_ranks(self) -> int:
        """Return the maximum number of ranks that fit at the same time."""
        return max([*(room.slots for room in self.hosts), *(sum(gang.sizes) for gang in self.gangs)])

    def get_full_hosts(self) -> set[int]:
        """Return the numbers of ranks that fill the largest 1, 2, 4, ... hosts of a gang."""
        return {sum(gang.sizes[: 1 << k]) for gang in self.gangs for k in range(len(gang.sizes).bit_length())}

    def iterate_degrees(self, ranks: int, fixed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the fixed layout fields that keep tp inside a host.

        If one host fits all ranks, tp is not fixed.
        """
        if any(room.slots >= ranks for room in self.hosts):
            yield {**fixed}
            return
        largest = max(gang.sizes[0] for gang in self.gangs)
        for tp in [fixed["tp"]] if "tp" in fixed else [t for t in get_divisors(ranks) if t <= largest]:
            if any(gang.fits(ranks, tp) for gang in self.gangs):
                yield {**fixed, "tp": tp}

    def get_memory_bytes(self, ranks: int) -> int:
        """Return the least memory per rank on all hosts that can run the ranks."""
        alone = [room.memory_bytes for room in self.hosts if room.slots >= ranks]
        return min(alone or [gang.memory_bytes for gang in self.gangs if gang.fits(ranks, 1)])

    def format_slots(self) -> str:
        """Format the number of slots."""
        text = f"the largest host has {format_count(max(room.slots for room in self.hosts), 'slot')}"
        if not self.gangs:
            return text
        sizes = max((gang.sizes for gang in self.gangs), key=sum)
        return f"{text}, and {len(sizes)} hosts of the same hardware model have {sum(sizes)} slots in total"


FIELD = "layout.auto"
GIB = 2**30
NUM_RUNNERS_UP = 4
MAX_SEARCHES = 64  # Each combination of allowed values is one search.
MAX_CONSECUTIVE_RANKS = (
    16  # Up to this number of ranks, every number is searched. Above it, powers of two and the maximum.
)
ANY_MEMORY = 2**60
MAX_SMALLEST_LAYOUTS = 500  # to find the smallest memory, if no layout fits
T = TypeVar("T")
OneOrSome: TypeAlias = T | Annotated[list[T], Field(min_length=1, max_length=16)] | None


class AutoSpec(StrictModel):
    """Constraints of an automatic layout. Each option has one value or a list of allowed values."""

    ranks: int | None = Field(
        default=None,
        ge=1,
        le=MAX_RANKS,
        description="number of ranks; by default, the number that gives the fastest step",
    )
    max_ranks: int | None = Field(default=None, ge=1, le=MAX_RANKS, description="maximum number of ranks")
    cluster: str | None = Field(
        default=None,
        max_length=200,
        pattern=NO_NUL,
        description="name of a cluster that GET /clusters lists, or own:FIELD=NUMBER,... for an own accelerator; "
        "default the connected hosts",
    )
    max_micro_batch: int = Field(default=16, ge=1, le=1024, description="largest micro-batch (sequences)")
    max_memory_bytes: int | None = Field(default=None, ge=1, le=2**60, description="memory limit per rank (bytes)")
    dp: OneOrSome[Degree] = None
    pp: OneOrSome[Degree] = None
    tp: OneOrSome[Degree] = None
    cp: OneOrSome[Degree] = None
    ep: OneOrSome[Degree] = None
    zero: OneOrSome[Annotated[int, Field(ge=0, le=3)]] = None
    schedule: OneOrSome[Schedule] = None
    virtual_stages: OneOrSome[Annotated[int, Field(ge=1, le=64)]] = None
    recompute: OneOrSome[Recompute] = None
    sequence_parallel: OneOrSome[bool] = None


class ChosenLayout(TypedDict):
    """Layout with its predicted step time and memory. `layout` lists only the values that are not defaults."""

    layout: LayoutDict
    words: str
    ranks: int
    micro_batches: int
    step_s: float
    memory_bytes: int


class RunnerUp(ChosenLayout):
    """Alternative layout. `slower` and `heavier` are relative to the chosen layout."""

    slower: float
    heavier: float


class AutoLayout(ChosenLayout):
    """Result of a layout "auto": the constraints, the reason, and the runners-up.

    `complete`: false if the limit of layouts ended the search.
    """

    asked: Annotated[dict[str, Any], SchemaFrom(AutoSpec)]
    why: str
    cluster: str
    considered: int
    complete: bool
    runners_up: list[RunnerUp]


class Choice(NamedTuple):
    """Spec with the chosen layout, and the description of the choice."""

    spec: JobSpec
    chosen: AutoLayout


def parse_auto_spec(data: object) -> AutoSpec | None:
    """Return the constraints of an automatic layout, or None if the spec has a layout.

    Raises:
        SpecError: If a constraint is unknown or invalid.
    """
    layout = data.get("layout") if isinstance(data, Mapping) else None
    if layout == "auto":
        return AutoSpec()
    if not isinstance(layout, Mapping) or "auto" not in layout:
        return None
    beside = [Problem(f"layout.{name}", _next_to_auto(name)) for name in layout if name != "auto"]
    try:
        auto_spec = AutoSpec.model_validate(layout["auto"])
    except ValidationError as error:
        raise SpecError([*beside, *_inside(error)]) from None
    if beside:
        raise SpecError(beside)
    return auto_spec


def _next_to_auto(name: object) -> str:
    return f"`layout.{name}` is set outside `{FIELD}`. Move it into `{FIELD}`."


def _inside(error: ValidationError) -> list[Problem]:
    """Return one problem per constraint, for the value or list that matches best."""
    deepest: dict[str, Any] = {}
    for detail in error.errors(include_url=False):
        field = ".".join([FIELD, *map(str, detail["loc"][:1])])
        is_list = isinstance(detail["input"], list)
        if field not in deepest or is_list or len(detail["loc"]) > len(deepest[field]["loc"]):
            deepest[field] = detail
    return [convert_error(detail, AutoSpec, field) for field, detail in deepest.items()]


def parse_draft(data: Mapping[str, Any]) -> JobSpec:
    """Parse a spec without its layout.

    Raises:
        SpecError: With every problem that no layout can solve.
    """
    train = data.get("train", {})
    if isinstance(train, Mapping):
        train = {name: value for name, value in train.items() if name != "micro_batches"}
    spec = parse_fields({**data, "layout": {}, "train": train})
    kind = get_kind_rules(spec.model_dump())
    if not kind.trains or kind.shares_one_slot:
        raise SpecError([Problem(FIELD, f"`kind` is {spec.kind}, but `{FIELD}` needs train. Set a layout.")])
    if found := find_problems(spec):
        raise SpecError(found)
    return spec


def find_fastest_layout(
    spec: JobSpec,
    cluster: Cluster,
    auto_spec: AutoSpec,
    capacity: Capacity,
    *,
    runnable: bool = True,
    max_layouts: float = math.inf,
) -> Choice:
    """Return the fastest layout of `spec` that fits all hosts it can be placed on.

    It spans several hosts if more ranks are faster, with tp inside a host. It keeps the margin of error of the memory
    free, unless no layout fits with it. `cluster` predicts the time.

    Raises:
        SpecError: If no layout fits, with the arithmetic.
    """
    worlds, combinations = _worlds(auto_spec, capacity), list(_combinations(auto_spec))
    spread = compute_memory_correction(cluster.runs)
    tries = [
        (world, inside)
        for world in worlds
        for fixed in combinations
        for inside in capacity.iterate_degrees(world, fixed)
    ]
    if not tries:
        why = f"a tp group stays inside one host: {capacity.format_slots()}"
        text = f"`{FIELD}.tp` is too large for {_ranks(worlds)}, because {why}."
        raise SpecError([Problem(f"{FIELD}.tp", text)])
    found, surely, refused, counts, complete = [], [], Counter[str](), 0, True
    for index, (world, fixed) in enumerate(tries):
        left = (max_layouts - counts) / (len(tries) - index)  # Later searches get what earlier ones leave.
        if left <= 0:
            complete = False
            break
        room = _memory(auto_spec, capacity, world)
        limits = Constraints(world, fixed, auto_spec.max_micro_batch, room, runnable, left)
        result = search(spec, cluster, limits, limit=NUM_RUNNERS_UP + 1)
        found += result.best
        surely += [f for f in result.best if f.memory_bytes <= get_safe_peak_bytes(cluster, spec, spread, room)]
        refused.update(result.refused)
        counts += result.considered
        complete &= result.complete
    if not found and not complete:
        tried = f"{counts:,} layouts on {_ranks(worlds)} of {cluster.name}"
        text = f"`{FIELD}` reached its limit of layouts after {tried}. None fits. Set more layout fields."
        raise SpecError([Problem(FIELD, text)])
    if not found:
        raise SpecError([Problem(FIELD, _nothing(spec, cluster, auto_spec, capacity, worlds, refused))])
    tight = not surely
    best = _unlike(sorted(surely or found, key=_order))[: NUM_RUNNERS_UP + 1]
    room = _memory(auto_spec, capacity, best[0].spec.layout.world_size)
    chosen: AutoLayout = {
        "asked": auto_spec.model_dump(exclude_defaults=True),
        "why": _why(best, cluster, room, worlds, counts, complete, tight=tight),
        "cluster": cluster.name,
        "considered": counts,
        "complete": complete,
        **_line(best[0]),
        "runners_up": [_beside(other, best[0]) for other in best[1:]],
    }
    return Choice(best[0].spec, chosen)


def _order(found: FittingLayout) -> tuple[float, int, int, int]:
    """Return the sort key: time, then number of ranks, memory, and ZeRO stage."""
    layout = found.spec.layout
    return float(f"{found.timing.step_s:.4g}"), layout.world_size, found.memory_bytes, layout.zero


def _unlike(ordered: Sequence[FittingLayout]) -> list[FittingLayout]:
    """Remove duplicates: schedule and chunks have no effect without a pipeline."""
    first: dict[str, FittingLayout] = {}
    for found in ordered:
        first.setdefault(f"{found.spec.layout!r} {found.spec.train.micro_batches}", found)
    return list(first.values())


def _worlds(auto_spec: AutoSpec, rooms: Capacity) -> list[int]:
    """Return the numbers of ranks to search, the largest first."""
    most = rooms.max_ranks
    if auto_spec.ranks is not None and auto_spec.max_ranks is not None and auto_spec.ranks > auto_spec.max_ranks:
        raise SpecError(
            [
                Problem(
                    f"{FIELD}.ranks",
                    f"`{FIELD}.ranks` is {auto_spec.ranks}. Use at most max_ranks {auto_spec.max_ranks}.",
                )
            ]
        )
    if auto_spec.ranks is not None:
        if auto_spec.ranks > most:
            raise SpecError(
                [
                    Problem(
                        f"{FIELD}.ranks",
                        f"`{FIELD}.ranks` is {auto_spec.ranks}, but {rooms.format_slots()}. Use at most {most}.",
                    )
                ]
            )
        return [auto_spec.ranks]
    most = min(most, auto_spec.max_ranks or most)
    every = range(1, min(most, MAX_CONSECUTIVE_RANKS) + 1)
    powers = (1 << power for power in range(most.bit_length()))
    return sorted({most, *every, *powers, *(ranks for ranks in rooms.get_full_hosts() if ranks <= most)}, reverse=True)


def _combinations(auto_spec: AutoSpec) -> Iterator[dict[str, Any]]:
    choices = {name: value for name in FIXABLE if (value := getattr(auto_spec, name)) is not None}
    some = {name: value if isinstance(value, list) else [value] for name, value in choices.items()}
    number = math.prod(len(values) for values in some.values())
    if number > MAX_SEARCHES:
        sizes = " x ".join(f"{name} {len(values)}" for name, values in some.items())
        text = f"`{FIELD}` has {sizes} = {number} combinations. Use at most {MAX_SEARCHES}."
        raise SpecError([Problem(FIELD, text)])
    for values in itertools.product(*some.values()):
        yield dict(zip(some, values, strict=True))


def _memory(auto_spec: AutoSpec, rooms: Capacity, world: int) -> int:
    least = rooms.get_memory_bytes(world)
    return min(least, auto_spec.max_memory_bytes or least)


def _nothing(
    spec: JobSpec,
    cluster: Cluster,
    auto_spec: AutoSpec,
    rooms: Capacity,
    worlds: Sequence[int],
    refused: Counter[str],
) -> str:
    """Explain why no layout fits: layouts per reason, and the memory of the smallest."""
    where = f"on {_ranks(worlds)} of {cluster.name}"
    if not refused:
        degrees = ", ".join(f"{n} {v}" for n, v in auto_spec.model_dump(exclude_defaults=True).items() if n in FIXABLE)
        return f"No layout {where} has {degrees}, because dp x pp x tp x cp is the number of ranks."
    reasons = "; ".join(f"{count:,}: {reason}" for reason, count in refused.most_common(4))
    text = f"None of {refused.total():,} layouts {where} is valid and fits. Reasons: {reasons}."
    if not any(reason.startswith("memory") for reason in refused):
        return text
    lightest: list[FittingLayout] = []
    accelerator = cluster.accelerator.model_copy(update={"memory_bytes": ANY_MEMORY})
    roomy = cluster.model_copy(update={"accelerator": accelerator})
    combinations = list(_combinations(auto_spec))
    for fixed in combinations:
        limits = Constraints(
            worlds[0], fixed, auto_spec.max_micro_batch, max_layouts=MAX_SMALLEST_LAYOUTS / len(combinations)
        )
        lightest += search(spec, roomy, limits, limit=1).pareto[-1:]
    if not lightest:
        return text
    least = min(lightest, key=lambda found: found.memory_bytes)
    room = _memory(auto_spec, rooms, worlds[0])
    needs = f"{least.memory_bytes / GIB:.2f} GiB of {room / GIB:.2f} GiB per rank"
    return f"{text} The smallest layout, {format_layout(least.spec)}, needs {needs}."


def _why(
    best: Sequence[FittingLayout],
    cluster: Cluster,
    room: int,
    worlds: Sequence[int],
    considered: int,
    complete: bool,
    *,
    tight: bool,
) -> str:
    first = best[0]
    sure = compute_time_interval(
        cluster, first.spec, Timer(cluster).get_correction(first.spec), first.timing.host_share
    )
    lines = [
        f"{format_layout(first.spec)}: {first.timing.step_s:.3g} s per step ({sure['words']}), "
        f"{first.memory_bytes / GIB:.2f} GiB of {room / GIB:.2f} GiB on the fullest rank.",
        *["The free memory is less than the margin of error of the estimate."] * tight,
        f"This is the fastest of {considered:,} layouts that fits{'' if tight else ' with this margin'} on "
        f"{_ranks(worlds)} of {cluster.name}.",
        *["The search reached its limit of layouts, so faster layouts can be missing."] * (not complete),
    ]
    if len(best) > 1:
        slower = best[1].timing.step_s / first.timing.step_s - 1
        close = " The difference is within the margin of error." if slower < sure["share"] else ""
        behind = "equally fast" if slower < 0.0005 else f"{slower:.1%} slower"
        lines.append(f"The next layout, {format_layout(best[1].spec)}, is {behind}.{close}")
    return " ".join(lines)


def format_layout(spec: JobSpec) -> str:
    """Format a layout, such as 'dp 2 x tp 2, ZeRO-1, 4 micro-batches of 2'."""
    x = spec.layout
    parts = [
        " x ".join(f"{a} {getattr(x, a)}" for a in ("pp", "dp", "cp", "ep", "tp") if getattr(x, a) > 1) or "one rank"
    ]
    parts += [f"ZeRO-{x.zero}"] * (x.zero > 0)
    parts += [SCHEDULE_NAMES[x.schedule]] * (x.pp > 1)
    parts += [f"recompute {x.recompute}"] * (x.recompute != "none")
    m = spec.train.micro_batches
    return ", ".join([*parts, f"{m} micro-{'batch' if m == 1 else 'batches'} of {spec.micro_batch_size}"])


def _ranks(worlds: Sequence[int]) -> str:
    least, most = min(worlds), max(worlds)
    if least == most:
        return "1 rank" if most == 1 else f"{most:,} ranks"
    if len(worlds) == most - least + 1:
        return f"{least:,} to {most:,} ranks"
    more = [f"{world:,}" for world in sorted(worlds) if world > MAX_CONSECUTIVE_RANKS]
    return f"{', '.join([f'1 to {MAX_CONSECUTIVE_RANKS}', *more[:-1]])} and {more[-1]} ranks"


def _line(found: FittingLayout) -> ChosenLayout:
    return {
        "layout": found.spec.layout.model_dump(exclude_defaults=True),
        "words": format_layout(found.spec),
        "ranks": found.spec.layout.world_size,
        "micro_batches": found.spec.train.micro_batches,
        "step_s": found.timing.step_s,
        "memory_bytes": found.memory_bytes,
    }


def _beside(other: FittingLayout, first: FittingLayout) -> RunnerUp:
    slower = other.timing.step_s / first.timing.step_s - 1
    return {**_line(other), "slower": slower, "heavier": other.memory_bytes / first.memory_bytes - 1}
