"""What an engine does not allow of a spec, each with its reason."""

from __future__ import annotations

from operator import attrgetter

from planner.facts.kinds import KINDS, num_slots
from planner.facts.resources import SlurmSpec
from planner.facts.spec import JobSpec, Problem
from planner.facts.words import counted

# What the board's scheduler alone heeds, and what to say of it instead.
OF_HOSTS = {
    "resources.host": "names a host of the board; Slurm chooses the nodes of its own",
    "resources.pool": "is of hosts of the board; resources.slurm.partition names Slurm's",
    "resources.labels": "are of hosts of the board; resources.slurm.constraint names features of nodes",
    "resources.max_hosts": "bounds hosts of the board; resources.slurm.nodes says how many nodes there are",
    "run.preemptible": "is for hosts of the board; what Slurm may preempt, resources.slurm.qos or partition says",
}


def engine_problems(spec: JobSpec) -> list[Problem]:
    """Every field that does not go with the engine that the spec names."""
    resources = spec.resources
    if resources.engine == "hosts":
        text = "is for engine slurm, and this job's is hosts"
        return [Problem("resources.slurm", text)] if resources.slurm is not None else []
    found = [Problem(field, words) for field, words in OF_HOSTS.items() if attrgetter(field)(spec)]
    if KINDS[spec.kind].of_a_host:
        found.append(Problem("resources.engine", f"a {spec.kind} job measures a host of the board: engine hosts"))
    limit = slurm_of(spec).time_limit
    if limit is not None and not limit.strip("0:-"):
        found.append(Problem("resources.slurm.time_limit", "must be longer than zero, which is no limit to Slurm"))
    nodes, slots = slurm_of(spec).nodes, num_slots(spec)
    if slots % nodes:
        rest = f"{slots} = {slots // nodes} x {nodes} + {slots % nodes}"
        text = f"{counted(slots, 'slot')} {'is' if slots == 1 else 'are'} not divisible by {nodes} nodes: {rest}"
        found.append(Problem("resources.slurm.nodes", text))
    return found


def slurm_of(spec: JobSpec) -> SlurmSpec:
    """What it asks of Slurm; the defaults where it says nothing."""
    return spec.resources.slurm or SlurmSpec()
