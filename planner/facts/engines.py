"""What an engine does not allow of a spec, each with its reason."""

from __future__ import annotations

from planner.facts.kinds import KINDS, num_slots
from planner.facts.resources import SlurmSpec
from planner.facts.spec import JobSpec, Problem
from planner.facts.words import counted


def engine_problems(spec: JobSpec) -> list[Problem]:
    """Every field that does not go with the engine that the spec names."""
    resources = spec.resources
    if resources.engine == "hosts":
        text = "is for engine slurm, and this job's is hosts"
        return [Problem("resources.slurm", text)] if resources.slurm is not None else []
    found = []
    if resources.host is not None:
        found.append(Problem("resources.host", "names a host of the board; Slurm chooses the nodes of its own"))
    if KINDS[spec.kind].of_a_host:
        found.append(Problem("resources.engine", f"a {spec.kind} job measures a host of the board: engine hosts"))
    nodes, slots = slurm_of(spec).nodes, num_slots(spec)
    if slots % nodes:
        rest = f"{slots} = {slots // nodes} x {nodes} + {slots % nodes}"
        text = f"{counted(slots, 'slot')} {'is' if slots == 1 else 'are'} not divisible by {nodes} nodes: {rest}"
        found.append(Problem("resources.slurm.nodes", text))
    return found


def slurm_of(spec: JobSpec) -> SlurmSpec:
    """What it asks of Slurm; the defaults where it says nothing."""
    return spec.resources.slurm or SlurmSpec()
