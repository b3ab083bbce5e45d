"""What a run of the trainer that a machine is to measure is asked, and what is predicted of its memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.running import Part, torchrun
from planner.cost.estimate import estimate
from planner.facts.model_shapes import count_parameters
from planner.facts.parse_spec import parse_spec
from planner.facts.precision import get_mixed_precision
from planner.facts.spec import JobSpec
from planner.facts.spec_rules import find_unsupported_fields
from planner.facts.validation import SpecError
from planner.hardware.catalog import CLUSTERS
from planner.hardware.cluster import Cluster

NO_GPU = "no GPU"
GIB = 2**30
ROOM = 0.92  # of a device's memory, that a plan may fill
# By which the time of a call is shared. The first two are guesses, on the long side: no GPU's log has them.
START_S = 25.0  # torchrun, torch twice, CUDA, NCCL, the corpus, the profiler
COMPILE_S = 45.0
DRAW_S = 6e-9  # of a parameter's initial value, on one core of an AMD EPYC, torch 2.13; more cores draw side by side

Tree = dict[str, Any]


class RefusedError(ValueError):
    """So many ranks make no such layout, or the trainer does not do what it asks for."""


class Size(NamedTuple):
    """A model, by its name, and a batch of it."""

    name: str
    model: Tree
    seq_len: int
    micro_batch: int


def spec_for(machine: Machine, model: Tree, layout: Tree, train: Tree) -> JobSpec:
    """Raises RefusedError where so many ranks cannot be laid out so, and where the trainer does not do it."""
    resources, train = {"device": machine.device}, {"eval_every": 0, "warmup_steps": 2, **train}
    try:
        spec = parse_spec({"model": model, "layout": layout, "train": train, "resources": resources})
    except SpecError as error:
        if all(problem.field.startswith("layout") for problem in error.problems):
            raise RefusedError(f"not possible on {machine.ranks} ranks: {error}") from None
        raise
    if refused := find_unsupported_fields(spec):
        raise RefusedError(str(SpecError(refused)))
    return spec


def training_part(
    machine: Machine, name: str, title: str, spec: JobSpec, purpose: str, step_s: float, more: Mapping[str, Any]
) -> Part:
    """`step_s`: of a step, as far as one knows before."""
    own = ("--device", machine.device, "--purpose", purpose, "--spec", spec.model_dump_json())
    peak = (
        machine.cluster.accelerator.get_peak_flops(get_mixed_precision(spec.train.precision).gemm)
        if machine.cluster
        else None
    )
    rates = ("--peak-flops", str(peak)) if peak and purpose == "speed" else ()
    argv = torchrun(machine.ranks, "benchmarks.gpu.training", *own, *rates)
    return Part(name, title, argv, expected_s=expected_s(spec, step_s), **more)


def expected_s(spec: JobSpec, step_s: float) -> float:
    """What a run may well take whole."""
    built_s = count_parameters(spec.model) * DRAW_S + (COMPILE_S if spec.train.compile else 0.0)
    return START_S + built_s + (spec.train.steps + 1) * step_s


def cluster_for(machine: Machine) -> Cluster:
    """For memory, which no rate has a part in, of an unknown accelerator too."""
    return machine.cluster or CLUSTERS["h100"]


def held_bytes(spec: JobSpec, machine: Machine) -> int:
    return estimate(spec, cluster_for(machine))["peak_memory_bytes"]


def tensor_bytes(spec: JobSpec, machine: Machine) -> int:
    """Of the stage that holds most."""
    stages = estimate(spec, cluster_for(machine))["stages"]
    return max(stage["memory_bytes"] - stage["memory"]["allowance"] for stage in stages)


def grown_gib(spec: JobSpec, machine: Machine) -> float:
    """GiB of tensors and of what the allocator holds beside them; the context is not torch's."""
    reserved = cluster_for(machine).accelerator.reserved_bytes
    return (held_bytes(spec, machine) - reserved) / GIB


def unknown(machine: Machine) -> str:
    return f"no time is predicted: the planner knows no accelerator called {machine.name}"
