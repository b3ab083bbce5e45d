"""Define the rules and slots of each job kind and of each engine.

`jobs.core.kinds` defines the page of each kind, and `workers.host.programs` the program of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from planner.facts.collectives import find_lab_problems
from planner.facts.launch_command import find_command_problems
from planner.facts.log_pattern import PATTERN_HINT, LogPatternError, check_log_pattern
from planner.facts.resources import SlurmSpec
from planner.facts.spec import JobKind, JobSpec, Layout, ScriptSpec
from planner.facts.validation import (
    Problem,
    find_file_problems,
    find_path_problems,
    format_count,
    format_nearest,
    get_divisors,
)

DEFAULT_KIND: JobKind = "train"
TRAINING_SECTIONS = ("model", "train", "dry_ranks")  # Fields that a `dp_only` kind does not use.


class KindRules(NamedTuple):
    """Rules of a job kind.

    `trains`: the trainer runs it, so the rules of batch and layout apply. Other kinds need no model.
    `shares_one_slot`: all ranks run in one slot, one after another.
    `one_host`: all ranks run on one host.
    `measures_host`: it measures a connected host, so it cannot run on Slurm.
    `dp_only`: dp is the only axis.
    `section`: the section of the spec that only this kind uses.
    `find_problems`: returns the problems of additional rules.
    """

    trains: bool
    find_problems: Callable[[JobSpec], list[Problem]]
    dp_only: bool = False
    shares_one_slot: bool = False
    measures_host: bool = False
    one_host: bool = False
    section: str | None = None

    def count_slots(self, world_size: int) -> int:
        """Return the number of slots that a world size needs."""
        return 1 if self.shares_one_slot else world_size


def _find_no_problems(_spec: JobSpec) -> list[Problem]:
    return []


def reset_dry_ranks(spec: JobSpec) -> JobSpec:
    """Return the spec with default `dry_ranks`, for a search over other world sizes."""
    return spec.model_copy(update={"dry_ranks": [0]})


def _find_dry_rank_problems(spec: JobSpec) -> list[Problem]:
    beyond = [rank for rank in spec.dry_ranks if rank >= spec.layout.world_size]
    has, missing = format_world_size(spec.layout), ", ".join(map(str, beyond))
    text = f"`dry_ranks` contains {missing}, but {has}. Use ranks from 0 to {spec.layout.world_size - 1}."
    return [Problem("dry_ranks", text)] if beyond else []


def _find_script_problems(spec: JobSpec) -> list[Problem]:
    script, found = spec.script, []
    if script is None:
        return [Problem("script", "`script` is missing. Set `script.path`, `script.module`, or `script.command`.")]
    used = [name for name in ("path", "module", "command") if getattr(script, name) is not None]
    if len(used) != 1:
        fields = " and ".join(used) or "no path, module, or command"
        found.append(Problem("script", f"`script` has {fields}. Set one of path, module, and command."))
    if script.command is not None:
        found += find_command_problems(script.command, spec)
    if script.module is not None and not all(part.isidentifier() for part in script.module.split(".")):
        text = f"`script.module` is {script.module!r}, which is not a module name. Use a name such as package.train."
        found.append(Problem("script.module", text))
    root = "script root" if script.upload is None else "upload"
    found += find_file_problems("script.path", script.path, root)
    found += find_path_problems("script.cwd", script.cwd, root)
    if not found and (text := explain_invalid_cwd(script)):
        found.append(Problem("script.cwd", text))
    layout = script.plan.layout if script.plan is not None else None
    if layout is not None and layout.world_size != spec.layout.dp:
        text = f"`script.plan.layout` has {format_world_size(layout)}, but the job has {spec.layout.dp}."
        found.append(Problem("script.plan.layout", f"{text} Change the degrees or the number of ranks."))
    if script.log_pattern is not None:
        try:
            check_log_pattern(script.log_pattern)
        except LogPatternError as error:
            text = f"`script.log_pattern` is {script.log_pattern[:60]!r}: {error}. {PATTERN_HINT}"
            found.append(Problem("script.log_pattern", text))
    return found


def explain_invalid_cwd(script: ScriptSpec) -> str:
    """Return why a script cannot use its working directory, or an empty text.

    A script can write to its directory. In a directory of other scripts it could replace their modules. An upload
    contains no scripts of others.
    """
    if script.cwd is None or script.upload is not None:
        return ""
    cwd = PurePosixPath(script.cwd)
    if script.module is not None or script.command is not None:
        text = (
            f"`script.cwd` is {script.cwd!r}, the script root that all users share. Omit it, or use a folder below it."
        )
        return "" if cwd.parts else text
    own = PurePosixPath(script.path or "").parent
    if cwd.is_relative_to(own):
        return ""
    return f"`script.cwd` is {script.cwd!r}. Use {str(own)!r}, the folder of {script.path!r}, or a folder below it."


def _find_calibration_problems(spec: JobSpec) -> list[Problem]:
    if spec.resources.host is not None:
        return []
    return [Problem("resources.host", "`resources.host` is missing. Name the host to calibrate.")]


KINDS: dict[JobKind, KindRules] = {
    "train": KindRules(trains=True, find_problems=_find_no_problems),
    "dry_run": KindRules(trains=True, shares_one_slot=True, one_host=True, find_problems=_find_dry_rank_problems),
    "script": KindRules(trains=False, dp_only=True, section="script", find_problems=_find_script_problems),
    "lab": KindRules(
        trains=False, dp_only=True, one_host=True, measures_host=True, section="lab", find_problems=find_lab_problems
    ),
    "calibrate": KindRules(
        trains=False, dp_only=True, one_host=True, measures_host=True, find_problems=_find_calibration_problems
    ),
}


def get_kind_rules(spec: Mapping[str, object]) -> KindRules:
    """Return the rules of the kind of a stored spec. The oldest specs have no kind."""
    return KINDS[spec.get("kind", DEFAULT_KIND)]  # type: ignore[index]  # checked before it was stored


def drop_unused_fields(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored spec without the fields that its kind does not use."""
    if not get_kind_rules(spec).dp_only:
        return dict(spec)
    used_fields = {name: value for name, value in spec.items() if name not in TRAINING_SECTIONS}
    return {**used_fields, "layout": {"dp": spec["layout"]["dp"]}}


def find_kind_problems(spec: JobSpec) -> list[Problem]:
    """Return the problems of a spec with its kind."""
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
    if kind.dp_only and spec.layout != Layout(dp=spec.layout.dp):
        text = f"`layout` sets fields other than dp, but a {spec.kind} job uses dp only. Set only dp."
        found.append(Problem("layout", text))
    if kind.one_host and (spec.resources.max_hosts or 1) > 1:
        text = f"`resources.max_hosts` is {spec.resources.max_hosts}, but a {spec.kind} job runs on one host. Use 1."
        found.append(Problem("resources.max_hosts", text))
    return [*found, *kind.find_problems(spec)]


def make_planned_spec(spec: JobSpec, layout: Layout) -> JobSpec:
    """Return the training job that `script.plan` describes, in a layout. The script must have a plan."""
    assert spec.script is not None
    assert spec.script.plan is not None
    plan = spec.script.plan
    resources = spec.resources.model_copy(update={"engine": "hosts", "slurm": None})
    return JobSpec(name=spec.name, model=plan.model, layout=layout, train=plan.train, resources=resources)


def get_num_slots(spec: JobSpec) -> int:
    """Return the number of slots that a job needs."""
    return KINDS[spec.kind].count_slots(spec.layout.world_size)


def saves_checkpoints(spec: JobSpec) -> bool:
    """Return whether a run of the spec writes checkpoints."""
    kind = KINDS[spec.kind]
    return kind.trains and not kind.shares_one_slot and spec.train.checkpoint_every > 0


def format_world_size(layout: Layout) -> str:
    """Format the degrees and their product, such as 'dp 2 x pp 1 x tp 2 = 4 ranks'."""
    cp = f" x cp {layout.cp}" if layout.cp > 1 else ""
    return f"dp {layout.dp} x pp {layout.pp}{cp} x tp {layout.tp} = {format_count(layout.world_size, 'rank')}"


class SlotDemand(NamedTuple):
    """Number of slots of a gang, and how hosts can share them.

    `units`: each host takes a multiple of a unit of slots, the best unit first.
    A unit is a tensor-parallel group, with its context-parallel groups if hosts are large enough.
    `max_hosts`: the maximum number of hosts; 0 is no limit.
    """

    num_slots: int
    units: tuple[int, ...] = (1,)
    max_hosts: int = 1

    def get_best_unit(self, sizes: Iterable[int]) -> int | None:
        """Return the best unit that fits empty hosts of these sizes, or None."""
        sizes = sorted(sizes, reverse=True)
        if not sizes:
            return None
        if self.num_slots <= sizes[0]:
            return self.units[0]
        return next((unit for unit in self.units if self.get_max_slots(sizes, unit) >= self.num_slots), None)

    def get_max_slots(self, sizes: Sequence[int], unit: int) -> int:
        """Return the slots that the largest hosts offer in multiples of the unit."""
        largest = sorted((round_down(size, unit) for size in sizes), reverse=True)
        return sum(largest[: self.max_hosts or None])


def round_down(slots: int, unit: int) -> int:
    """Return the largest multiple of the unit that is at most `slots`."""
    return slots - slots % unit


def compute_slot_demand(spec: JobSpec) -> SlotDemand:
    """Return the slots that a spec needs."""
    kind, layout, resources = KINDS[spec.kind], spec.layout, spec.resources
    units = (1,) if kind.shares_one_slot else tuple(dict.fromkeys((layout.tp * layout.cp, layout.tp)))
    has_command = spec.script is not None and spec.script.command is not None
    pinned = kind.one_host or has_command or resources.host is not None
    return SlotDemand(get_num_slots(spec), units, 1 if pinned else resources.max_hosts or 0)


# Fields that only the scheduler of connected hosts uses, and the alternative in Slurm.
HOSTS_ENGINE_FIELDS = {
    "resources.host": "Slurm chooses the nodes. Omit it",
    "resources.pool": "Slurm has no pools. Use `resources.slurm.partition`",
    "resources.labels": "Slurm has no labels. Use `resources.slurm.constraint`",
    "resources.max_hosts": "Slurm counts nodes. Use `resources.slurm.nodes`",
    "run.preemptible": "Slurm decides preemption. Use `resources.slurm.qos` or `resources.slurm.partition`",
}


def find_engine_problems(spec: JobSpec) -> list[Problem]:
    """Return the problems of a spec with its engine."""
    resources = spec.resources
    if resources.engine == "hosts":
        text = "`resources.slurm` is set, but `resources.engine` is hosts. Omit it, or use engine slurm."
        return [Problem("resources.slurm", text)] if resources.slurm is not None else []
    fields = ((field, attrgetter(field)(spec), words) for field, words in HOSTS_ENGINE_FIELDS.items())
    found = [
        Problem(field, f"`{field}` is {_format_value(value)}, but {words}.") for field, value, words in fields if value
    ]
    if KINDS[spec.kind].measures_host:
        found.append(
            Problem("resources.engine", f"`resources.engine` is slurm, but a {spec.kind} job needs hosts. Use hosts.")
        )
    limit = get_slurm_spec(spec).time_limit
    if limit is not None and not limit.strip("0:-"):
        found.append(
            Problem("resources.slurm.time_limit", f"`resources.slurm.time_limit` is {limit}. Use a time above zero.")
        )
    nodes, slots = get_slurm_spec(spec).nodes, get_num_slots(spec)
    if slots % nodes:
        has = f"{format_count(slots, 'slot')} {'is' if slots == 1 else 'are'} not divisible by {nodes}"
        text = f"`resources.slurm.nodes` is {nodes}, but {has}. Use {format_nearest(get_divisors(slots), nodes)}."
        found.append(Problem("resources.slurm.nodes", text))
    return found


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return "on"
    return ", ".join(value) if isinstance(value, list) else str(value)


def get_slurm_spec(spec: JobSpec) -> SlurmSpec:
    """Return the Slurm options of a spec, or the defaults."""
    return spec.resources.slurm or SlurmSpec()
