"""Define the kinds of job: the spec fields and the slots of each kind.

`jobs.core.kinds` defines the page of each kind, and `workers.host.start.programs` the program of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from planner.facts.collectives import lab_problems
from planner.facts.resources import SlurmSpec
from planner.facts.spec import JobKind, JobSpec, Layout, ScriptSpec
from planner.facts.validation import Problem, counted, divisors, file_problems, nearest, path_problems

DEFAULT: JobKind = "train"
OF_TRAINING = ("model", "train", "dry_ranks")  # of a spec: what a kind that is plain does not read


class Kind(NamedTuple):
    """What a kind asks of a spec.

    `trains`: its steps are the trainer's, whose rules on batch and layout apply; other kinds need no model either.
    `one_slot`: its ranks take turns in one slot. `one_host`: they share a host, whichever it is. `of_a_host`: it
    measures a host of the board. `plain`: takes dp ranks and no other axis. `section`: the part of the spec that only
    this kind has. `rules`: what else its spec must keep to.
    """

    trains: bool
    rules: Callable[[JobSpec], list[Problem]]
    plain: bool = False
    one_slot: bool = False
    of_a_host: bool = False
    one_host: bool = False
    section: str | None = None

    def slots(self, world_size: int) -> int:
        """Slots that so many ranks need."""
        return 1 if self.one_slot else world_size


def _nothing_more(_spec: JobSpec) -> list[Problem]:
    return []


def of_any_world(spec: JobSpec) -> JobSpec:
    """The spec without the ranks that it names: a search tries worlds that have others."""
    return spec.model_copy(update={"dry_ranks": [0]})


def _ranks_exist(spec: JobSpec) -> list[Problem]:
    beyond = [rank for rank in spec.dry_ranks if rank >= spec.layout.world_size]
    has, missing = product_words(spec.layout), ", ".join(map(str, beyond))
    text = f"`dry_ranks` contains {missing}, but {has}. Use ranks from 0 to {spec.layout.world_size - 1}."
    return [Problem("dry_ranks", text)] if beyond else []


def _lies_below_its_root(spec: JobSpec) -> list[Problem]:
    script, found = spec.script, []
    if script is None:
        return [Problem("script", "`script` is missing. A script job needs `script.path` or `script.module`.")]
    if (script.path is None) == (script.module is None):
        given = "neither path nor module" if script.path is None else "both path and module"
        found.append(Problem("script", f"`script` has {given}. Set one of them."))
    if script.module is not None and not all(part.isidentifier() for part in script.module.split(".")):
        text = f"`script.module` is {script.module!r}, which is not a module name. Use a name such as package.train."
        found.append(Problem("script.module", text))
    found += file_problems("script.path", script.path, "script root")
    found += path_problems("script.cwd", script.cwd, "script root")
    if not found and (text := why_not_its_folder(script)):
        found.append(Problem("script.cwd", text))
    return found


def why_not_its_folder(script: ScriptSpec) -> str:
    """Why a script may not work in the folder it asks for; empty where it may.

    The folder is its own to write to: one that holds another's scripts would let it plant modules there.
    """
    if script.cwd is None:
        return ""
    cwd = PurePosixPath(script.cwd)
    if script.module is not None:
        text = (
            f"`script.cwd` is {script.cwd!r}, the script root that all users share. Omit it, or use a folder below it."
        )
        return "" if cwd.parts else text
    own = PurePosixPath(script.path or "").parent
    if cwd.is_relative_to(own):
        return ""
    return f"`script.cwd` is {script.cwd!r}. Use {str(own)!r}, the folder of {script.path!r}, or a folder below it."


def _names_its_host(spec: JobSpec) -> list[Problem]:
    if spec.resources.host is not None:
        return []
    return [Problem("resources.host", "`resources.host` is missing. Name the host to calibrate.")]


KINDS: dict[JobKind, Kind] = {
    "train": Kind(trains=True, rules=_nothing_more),
    "dry_run": Kind(trains=True, one_slot=True, one_host=True, rules=_ranks_exist),
    "script": Kind(trains=False, plain=True, section="script", rules=_lies_below_its_root),
    "lab": Kind(trains=False, plain=True, one_host=True, of_a_host=True, section="lab", rules=lab_problems),
    "calibrate": Kind(trains=False, plain=True, one_host=True, of_a_host=True, rules=_names_its_host),
}


def kind_of(spec: Mapping[str, object]) -> Kind:
    """The kind of a stored spec; the oldest do not name theirs."""
    return KINDS[spec.get("kind", DEFAULT)]  # type: ignore[index]  # it was checked before it was stored


def fields_read(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A stored spec without what its kind never reads: each names a model and steps, also where nothing trains."""
    if not kind_of(spec).plain:
        return dict(spec)
    kept = {name: value for name, value in spec.items() if name not in OF_TRAINING}
    return {**kept, "layout": {"dp": spec["layout"]["dp"]}}


def kind_problems(spec: JobSpec) -> list[Problem]:
    """What the kind of a spec does not allow, each with its reason."""
    kind = KINDS[spec.kind]
    found = []
    for owner, other in KINDS.items():
        if other.section and other is not kind and getattr(spec, other.section) is not None:
            found.append(
                Problem(
                    other.section,
                    f"`{other.section}` is set, but the kind is {spec.kind}. Omit it, or use kind {owner}.",
                )
            )
    if kind.plain and spec.layout != Layout(dp=spec.layout.dp):
        text = f"`layout` sets fields other than dp, but a {spec.kind} job uses dp only. Set only dp."
        found.append(Problem("layout", text))
    if kind.one_host and (spec.resources.max_hosts or 1) > 1:
        text = f"`resources.max_hosts` is {spec.resources.max_hosts}, but a {spec.kind} job runs on one host. Use 1."
        found.append(Problem("resources.max_hosts", text))
    return [*found, *kind.rules(spec)]


def num_slots(spec: JobSpec) -> int:
    """Slots the job needs: one a rank, but for a kind whose ranks take turns in one."""
    return KINDS[spec.kind].slots(spec.layout.world_size)


def saves(spec: JobSpec) -> bool:
    """Whether a run of it writes checkpoints."""
    kind = KINDS[spec.kind]
    return kind.trains and not kind.one_slot and spec.train.checkpoint_every > 0


def product_words(layout: Layout) -> str:
    """'dp 2 x pp 1 x tp 2 = 4 ranks'."""
    cp = f" x cp {layout.cp}" if layout.cp > 1 else ""
    return f"dp {layout.dp} x pp {layout.pp}{cp} x tp {layout.tp} = {counted(layout.world_size, 'rank')}"


class Demand(NamedTuple):
    """Slots of a gang. `units`: what a host's share is a multiple of, the best first. `max_hosts` 0 is any number.

    The unit is what must stay inside a host: a tensor-parallel group, together with its context-parallel ones where
    hosts are large enough.
    """

    num_slots: int
    units: tuple[int, ...] = (1,)
    max_hosts: int = 1

    def unit_on(self, sizes: Iterable[int]) -> int | None:
        """The best unit with which hosts of so many slots could hold the gang, were they empty; None without one."""
        sizes = sorted(sizes, reverse=True)
        if not sizes:
            return None
        if self.num_slots <= sizes[0]:
            return self.units[0]
        return next((unit for unit in self.units if self.most(sizes, unit) >= self.num_slots), None)

    def most(self, sizes: Sequence[int], unit: int) -> int:
        """Slots that hosts of these sizes have together in multiples of the unit, the largest first."""
        largest = sorted((whole(size, unit) for size in sizes), reverse=True)
        return sum(largest[: self.max_hosts or None])


def whole(slots: int, unit: int) -> int:
    """The largest multiple of the unit that is not above so many slots."""
    return slots - slots % unit


def demand(spec: JobSpec) -> Demand:
    """What a spec asks for."""
    kind, layout, asked = KINDS[spec.kind], spec.layout, spec.resources
    units = (1,) if kind.one_slot else tuple(dict.fromkeys((layout.tp * layout.cp, layout.tp)))
    pinned = kind.one_host or asked.host is not None
    return Demand(num_slots(spec), units, 1 if pinned else asked.max_hosts or 0)


# What the board's scheduler alone heeds, and what to say of it instead.
OF_HOSTS = {
    "resources.host": "Slurm chooses the nodes. Omit it",
    "resources.pool": "Slurm has no pools. Use `resources.slurm.partition`",
    "resources.labels": "Slurm has no labels. Use `resources.slurm.constraint`",
    "resources.max_hosts": "Slurm counts nodes. Use `resources.slurm.nodes`",
    "run.preemptible": "Slurm decides preemption. Use `resources.slurm.qos` or `resources.slurm.partition`",
}


def engine_problems(spec: JobSpec) -> list[Problem]:
    """Every field that does not go with the engine that the spec names."""
    resources = spec.resources
    if resources.engine == "hosts":
        text = "`resources.slurm` is set, but `resources.engine` is hosts. Omit it, or use engine slurm."
        return [Problem("resources.slurm", text)] if resources.slurm is not None else []
    given = ((field, attrgetter(field)(spec), words) for field, words in OF_HOSTS.items())
    found = [Problem(field, f"`{field}` is {_shown(value)}, but {words}.") for field, value, words in given if value]
    if KINDS[spec.kind].of_a_host:
        found.append(
            Problem("resources.engine", f"`resources.engine` is slurm, but a {spec.kind} job needs hosts. Use hosts.")
        )
    limit = slurm_of(spec).time_limit
    if limit is not None and not limit.strip("0:-"):
        found.append(
            Problem("resources.slurm.time_limit", f"`resources.slurm.time_limit` is {limit}. Use a time above zero.")
        )
    nodes, slots = slurm_of(spec).nodes, num_slots(spec)
    if slots % nodes:
        has = f"{counted(slots, 'slot')} {'is' if slots == 1 else 'are'} not divisible by {nodes}"
        text = f"`resources.slurm.nodes` is {nodes}, but {has}. Use {nearest(divisors(slots), nodes)}."
        found.append(Problem("resources.slurm.nodes", text))
    return found


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on"
    return ", ".join(value) if isinstance(value, list) else str(value)


def slurm_of(spec: JobSpec) -> SlurmSpec:
    """What it asks of Slurm; the defaults where it says nothing."""
    return spec.resources.slurm or SlurmSpec()
