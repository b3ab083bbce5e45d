"""Build the specs of training runs for a machine, and predict their memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.running import BenchmarkPart, build_torchrun_command
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
MAX_MEMORY_SHARE = 0.92  # of a device's memory, that a plan may fill
# By which the time of a call is shared. The first two are guesses, on the long side: no GPU's log has them.
START_S = 25.0  # torchrun, torch twice, CUDA, NCCL, the corpus, the profiler
COMPILE_S = 45.0
DRAW_S = 6e-9  # of a parameter's initial value, on one core of an AMD EPYC, torch 2.13; more cores draw side by side

Tree = dict[str, Any]


class RejectedSpecError(ValueError):
    """The number of ranks does not allow this layout, or the trainer does not support the spec."""


class BenchmarkModel(NamedTuple):
    """A named model with its sequence length and batch."""

    name: str
    model: Tree
    seq_len: int
    micro_batch: int


def build_spec(machine: Machine, model: Tree, layout: Tree, train: Tree) -> JobSpec:
    """Build a spec, or raise RejectedSpecError."""
    resources, train = {"device": machine.device}, {"eval_every": 0, "warmup_steps": 2, **train}
    try:
        spec = parse_spec({"model": model, "layout": layout, "train": train, "resources": resources})
    except SpecError as error:
        if all(problem.field.startswith("layout") for problem in error.problems):
            raise RejectedSpecError(f"not possible on {machine.ranks} ranks: {error}") from None
        raise
    if refused := find_unsupported_fields(spec):
        raise RejectedSpecError(str(SpecError(refused)))
    return spec


def build_training_part(
    machine: Machine, name: str, title: str, spec: JobSpec, purpose: str, step_s: float, more: Mapping[str, Any]
) -> BenchmarkPart:
    """Build the part that runs the trainer. `step_s` is the expected step time."""
    own = ("--device", machine.device, "--purpose", purpose, "--spec", spec.model_dump_json())
    peak = (
        machine.cluster.accelerator.get_peak_flops(get_mixed_precision(spec.train.precision).gemm)
        if machine.cluster
        else None
    )
    rates = ("--peak-flops", str(peak)) if peak and purpose == "speed" else ()
    argv = build_torchrun_command(machine.ranks, "benchmarks.gpu.training", *own, *rates)
    return BenchmarkPart(name, title, argv, expected_s=estimate_run_s(spec, step_s), **more)


def estimate_run_s(spec: JobSpec, step_s: float) -> float:
    """Return the seconds that a whole run may take."""
    built_s = count_parameters(spec.model) * DRAW_S + (COMPILE_S if spec.train.compile else 0.0)
    return START_S + built_s + (spec.train.steps + 1) * step_s


def get_memory_cluster(machine: Machine) -> Cluster:
    """Return a cluster for memory predictions, which need no rates, also for unknown accelerators."""
    return machine.cluster or CLUSTERS["h100"]


def predict_reserved_bytes(spec: JobSpec, machine: Machine) -> int:
    return estimate(spec, get_memory_cluster(machine))["peak_memory_bytes"]


def predict_tensor_bytes(spec: JobSpec, machine: Machine) -> int:
    """Return the tensor bytes of the fullest stage."""
    stages = estimate(spec, get_memory_cluster(machine))["stages"]
    return max(stage["memory_bytes"] - stage["memory"]["allowance"] for stage in stages)


def predict_reserved_gib(spec: JobSpec, machine: Machine) -> float:
    """Return the GiB of tensors and of the allocator, without the CUDA context."""
    reserved = get_memory_cluster(machine).accelerator.reserved_bytes
    return (predict_reserved_bytes(spec, machine) - reserved) / GIB


def explain_unknown_device(machine: Machine) -> str:
    return f"no time is predicted: the planner knows no accelerator called {machine.name}"
