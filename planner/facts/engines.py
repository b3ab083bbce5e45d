"""What an engine does not allow of a spec, each with its reason."""

from __future__ import annotations

from operator import attrgetter

from planner.facts.kinds import KINDS, num_slots
from planner.facts.resources import SlurmSpec
from planner.facts.spec import JobSpec, Problem
from planner.facts.words import counted, divisors, nearest

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
