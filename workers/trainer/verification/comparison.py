"""Compare steps of a run with the single-process reference, and format the results of the verification."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from contracts.telemetry.results import Mismatch, ReferenceProof, ReplicaProof, RouterChoices
from planner.facts.single_process_reference import Tolerances
from planner.facts.spec import JobSpec
from planner.facts.validation import format_count
from workers.trainer.errors import UserError
from workers.trainer.model.decoder import iter_model_parameters
from workers.trainer.parallel.mesh import Mesh
from workers.trainer.trainer import StepResult
from workers.trainer.verification.reference import (
    ExpectedTensor,
    ReferenceRun,
    RoutingComparison,
    list_moe_layers,
)
from workers.trainer.verification.replicas import TensorShard

T = TypeVar("T")
MIN_RMS = 1e-30
LOSS_ROUNDING = 8 * 2.0**-23  # of a loss, in fp32; measured on memorized data with a loss of 1.6e-6
MAX_ROUNDING = 0.1  # fraction of a loss, smaller losses are not compared
MAX_LOSS_GROWTH = 2.0  # times the loss of the first step; diverging training amplifies rounding
MAX_MISMATCHES_IN_TEXT = 3
ROUNDING_KINDS = ("gradient", "gradient norm", "update")


class FirstStepTensors(NamedTuple):
    """Store unclipped gradients and updated weights of a rank's first step, in the order of its shards."""

    gradients: list[torch.Tensor]
    weights: list[torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.gradients, *self.weights))


class TrainedSteps(NamedTuple):
    """Store steps of a run after the first `done` on one rank, and optionally the eval loss before them."""

    done: int
    first: FirstStepTensors
    results: list[StepResult]
    validation: float | None = None


class ReferenceComparison(NamedTuple):
    """Store the largest relative differences from the reference, and the mismatches.

    Losses and norms are compared for `steps`, gradients and updates for the first of them. `failed` explains why there
    is no reference. `noted` explains skipped steps and higher limits. `choices` compares the routing of these steps.
    """

    steps: int = 0
    tensors: int = 0
    gradient: float = 0.0
    update: float = 0.0
    loss: float = 0.0
    norm: float = 0.0
    wrong: Sequence[Mismatch] = ()
    failed: str = ""
    noted: str = ""
    choices: RoutingComparison = RoutingComparison(0, 0, [])


def compare_with_reference(
    spec: JobSpec,
    mesh: Mesh,
    shards: list[TensorShard],
    ran: TrainedSteps,
    compute: Callable[[], ReferenceRun],
    limits: Tolerances,
    device: torch.device,
) -> ReferenceComparison:
    """Compare steps with the reference of rank 0. All ranks call this together."""
    results = ran.results
    reference, failed = run_on_rank_0(mesh, compute, device)
    if failed:
        return ReferenceComparison(failed=failed)
    expected = [] if reference is None else [v for r in reference.results for v in (r.loss, r.grad_norm)]
    scalars = _broadcast_numbers(mesh, expected, 2 * len(results), device)
    validation = _broadcast_numbers(mesh, [0.0 if reference is None else reference.validation or 0.0], 1, device)[0]
    own = [] if reference is None else [reference.choices.tokens, reference.choices.turned, *reference.choices.gaps]
    tokens, turned, *gaps = _broadcast_numbers(mesh, own, 2 + len(list_moe_layers(spec.model)), device)
    choices = RoutingComparison(int(tokens), int(turned), gaps)
    if not math.isfinite(scalars[0]):  # The loss of the run is finite.
        return ReferenceComparison(
            1, wrong=_find_mismatches("loss", [f"step {ran.done + 1}"], [math.nan], [0], [limits.loss])
        )
    noted, results = _select_comparable(results, scalars[::2], ran.done)
    if not results:
        return ReferenceComparison(failed=noted)
    losses = [_get_relative_difference(r.loss, scalars[2 * i]) for i, r in enumerate(results)]
    norms = [
        _get_relative_difference(r.grad_norm, scalars[2 * i + 1]) for i, r in enumerate(results[: limits.norm_steps])
    ]
    steps = [f"step {ran.done + i + 1}" for i in range(len(results))]
    loss_limits = [
        limits.loss + limits.loss_change * _get_relative_difference(scalars[0], loss) + _get_rounding(loss)
        for loss in scalars[: 2 * len(results) : 2]
    ]
    norm_limits = [limits.norm + _get_rounding(scalars[2 * i]) for i in range(len(norms))]
    rounding = _get_rounding(scalars[0])
    loss_names = steps
    if ran.validation is not None:
        losses.append(_get_relative_difference(ran.validation, validation))
        loss_limits.append(limits.loss + _get_rounding(validation))
        loss_names = [*steps, f"validation after step {ran.done}"]
    tensors = list(iter_model_parameters(spec.model))
    names = [name for name, _ in tensors]
    routers = [f"layers.{layer}.moe.router" for layer in list_moe_layers(spec.model)]
    gradient_limits = [_get_gradient_limit(limits, name, parameter.shape) + rounding for name, parameter in tensors]
    roundings = dict(zip(names, gradient_limits, strict=True))
    differences = _all_gather(mesh, _compute_differences(spec, mesh, shards, ran.first, reference, roundings, device))
    worst, ranks = (found.tolist() for found in differences.max(0))
    gradients, updates = ([row[column] for row in worst] for column in (0, 1))
    wrong = [
        *_find_mismatches("gradient", names, gradients, [row[0] for row in ranks], gradient_limits),
        *_find_mismatches("update", names, updates, [row[1] for row in ranks], [limits.update + rounding] * len(names)),
        *_find_mismatches("loss", loss_names, losses, [0] * len(loss_names), loss_limits),
        *_find_mismatches("gradient norm", steps[: len(norms)], norms, [0] * len(norms), norm_limits),
        *_find_mismatches("choice", routers, choices.gaps, [0] * len(routers), [limits.router_choice] * len(routers)),
    ]
    if rounding > limits.gradient / 10:
        higher = f"the limits are {rounding:.2g} higher because the loss is only {scalars[0]:.2g}"
        noted = f"{higher}; {noted}" if noted else higher
    gradient, update, loss, norm = (
        max(filter(math.isfinite, values), default=0.0) for values in (gradients, updates, losses, norms)
    )
    return ReferenceComparison(
        len(results), len(names), gradient, update, loss, norm, wrong, noted=noted, choices=choices
    )


def run_on_rank_0(mesh: Mesh, work: Callable[[], T], device: torch.device) -> tuple[T | None, str]:
    """Return the result of `work` on rank 0, None elsewhere, and the error message on all ranks."""
    result, failed = None, ""
    if mesh.rank == 0:
        try:
            result = work()
        except (RuntimeError, MemoryError, UserError) as error:  # most likely out of memory, which is no mismatch
            failed = f"Single-process reference unavailable: {str(error)[:300]}"
    if _broadcast_numbers(mesh, [float(not failed)], 1, device)[0]:
        return result, ""
    return None, failed or "Single-process reference unavailable on rank 0"


def _get_gradient_limit(limits: Tolerances, name: str, shape: tuple[int, ...]) -> float:
    if name.endswith("moe.router.weight"):
        return limits.router
    return limits.vector if len(shape) == 1 else limits.gradient


def _get_rounding(loss: float) -> float:
    """Return the relative rounding of a loss and its gradients.

    For a token with a probability close to 1, both are one minus the probability.
    """
    return LOSS_ROUNDING / max(abs(loss), MIN_RMS)


def _select_comparable(results: list[StepResult], losses: list[float], done: int) -> tuple[str, list[StepResult]]:
    """Return why later steps are not compared, and the comparable steps before them."""
    for index, loss in enumerate(losses):
        step = f"step {done + index + 1}{' and later are' if index else ' is'} not compared"
        if not loss <= MAX_LOSS_GROWTH * losses[0]:
            grew = f"the reference loss grew from {losses[0]:.3g} to {loss:.3g}, more than {MAX_LOSS_GROWTH:g} times"
            return f"{step}: {grew}", results[:index]
        if _get_rounding(loss) > MAX_ROUNDING:
            least = LOSS_ROUNDING / MAX_ROUNDING
            return f"{step}: the loss {loss:.3g} is too small for fp32 (less than {least:.3g})", results[:index]
    return "", results


def _compute_differences(
    spec: JobSpec,
    mesh: Mesh,
    shards: list[TensorShard],
    first: FirstStepTensors,
    reference: ReferenceRun | None,
    roundings: Mapping[str, float],
    device: torch.device,
) -> torch.Tensor:
    """Return relative differences of gradient and weight, (tensors, 2) float64; 0 for absent tensors.

    Weights count only if their gradient exceeds rounding, because Adam takes a full step by the sign of any gradient.
    """
    places_by_name: dict[str, list[int]] = {}
    for place, shard in enumerate(shards):
        places_by_name.setdefault(shard.name, []).append(place)
    rows = []
    for name, parameter in iter_model_parameters(spec.model):
        own = None if reference is None else reference.tensors[name]
        expected = _broadcast_tensor(mesh, own, parameter.shape, device)
        row = torch.zeros(2, dtype=torch.float64, device=device)
        for place in places_by_name.get(name, []):
            slices = shards[place].box.slices
            wanted = expected.gradient[slices]
            difference = _compute_rms(first.gradients[place].double() - wanted.double())
            gradient = difference / max(expected.gradient_rms, MIN_RMS)
            settled = wanted.abs() > roundings[name] * expected.gradient_rms
            weights = first.weights[place].double() - expected.weight[slices].double()
            weight = _compute_rms(weights * settled) / max(expected.update_rms, MIN_RMS)
            row = torch.maximum(row, torch.stack((gradient, weight)).nan_to_num(math.inf, posinf=math.inf))
        rows.append(row)
    return torch.stack(rows)


def _compute_rms(differences: torch.Tensor) -> torch.Tensor:
    return differences.square().mean().sqrt()


def _broadcast_tensor(
    mesh: Mesh, expected: ExpectedTensor | None, shape: tuple[int, ...], device: torch.device
) -> ExpectedTensor:
    """Broadcast the expected tensor of rank 0."""
    if mesh.layout.world_size == 1:
        assert expected is not None
        return expected
    rms = _broadcast_numbers(mesh, [] if expected is None else [expected.gradient_rms, expected.update_rms], 2, device)
    both = torch.empty((2, *shape), device=device)
    if expected is not None:
        both = torch.stack((expected.gradient.float(), expected.weight.float()))
    dist.broadcast(both, 0)
    return ExpectedTensor(both[0], both[1], *rms)


def _broadcast_numbers(mesh: Mesh, values: list[float], count: int, device: torch.device) -> list[float]:
    """Broadcast numbers of rank 0."""
    numbers = torch.zeros(count, dtype=torch.float64, device=device)
    if mesh.rank == 0:
        numbers = torch.tensor(values, dtype=torch.float64, device=device)
    if mesh.layout.world_size > 1:
        dist.broadcast(numbers, 0)
    return list(map(float, numbers.tolist()))


def _all_gather(mesh: Mesh, own: torch.Tensor) -> torch.Tensor:
    """Gather a tensor of every rank, (world, ...)."""
    if mesh.layout.world_size == 1:
        return own.unsqueeze(0)
    every = own.new_empty((mesh.layout.world_size, *own.shape))
    dist.all_gather_single(every.flatten(0, 1), own)
    return every


def _get_relative_difference(a: float, b: float) -> float:
    return abs(a - b) / max(abs(b), MIN_RMS)


def _find_mismatches(
    what: Literal["gradient", "update", "loss", "gradient norm", "choice"],
    names: list[str],
    values: list[float],
    ranks: list[int],
    limits: list[float],
) -> list[Mismatch]:
    found = []
    for name, value, rank, limit in zip(names, values, ranks, limits, strict=True):
        if not value <= limit:
            difference = value if math.isfinite(value) else None
            found.append(Mismatch(what=what, name=name, axis="", ranks=[rank], apart=difference, limit=limit))
    return found


def get_severity(apart: Mismatch) -> float:
    """Return the difference relative to its limit. NaN and infinite values come first."""
    if apart["apart"] is None:
        return math.inf
    return apart["apart"] / apart["limit"] if apart["limit"] else math.inf


def format_difference(apart: Mismatch) -> str:
    """Format a mismatch: 'gradient of head.weight differs from the reference by 6.1e-01 on rank 1 (limit 1e-04)'."""
    if apart["what"] == "share":
        return apart["name"]
    by = "with NaN or infinite values" if apart["apart"] is None else f"by {apart['apart']:.1e}"
    if apart["what"] == "rows":
        rows = f"rows of {apart['name']} on rank {apart['ranks'][0]}"
        return f"{apart['apart']:.0%} of the {rows} differ from the data on rank 0"
    subject = f"{apart['what']} of {apart['name']}"
    if len(apart["ranks"]) == 2:
        rank, other = apart["ranks"]
        where = f"on rank {rank} differs from rank {other} (over {apart['axis']}) {by}"
    elif apart["what"] in ("loss", "gradient norm", "choice"):
        where = f"differs from the reference {by}"
    else:
        where = f"differs from the reference {by} on rank {apart['ranks'][0]}"
    return f"{subject} {where} (limit {apart['limit']:.0e})"


def format_failure(wrong: Sequence[Mismatch]) -> str:
    """Format the worst mismatches, and count the rest."""
    worst = sorted(wrong, key=get_severity, reverse=True)
    text = "; ".join(format_difference(apart) for apart in worst[:MAX_MISMATCHES_IN_TEXT])
    rest = len(wrong) - MAX_MISMATCHES_IN_TEXT
    return f"verification failed: {text}" + (f"; and {rest} more" if rest > 0 else "")


def can_be_rounding(wrong: Sequence[Mismatch]) -> bool:
    """Return whether all mismatches can be rounding that one batch amplifies."""
    return bool(wrong) and all(apart["what"] in ROUNDING_KINDS for apart in wrong)


def format_retried_step(step: int, wrong: Sequence[Mismatch]) -> str:
    """Format the reason for another extra step."""
    return f"a later step was compared, because in step {step} {format_difference(max(wrong, key=get_severity))}"


def format_replicas(replicas: ReplicaProof, wrong: Sequence[Mismatch]) -> str:
    """Format the comparison of replicas: 'replicas match (34 of 60 shards have replicas, after steps 1, 50)'."""
    if not replicas["steps"]:
        return "replicas not compared: no steps left to train"
    mismatches = [apart for apart in wrong if len(apart["ranks"]) == 2 or apart["what"] in ("share", "rows")]
    steps = ", ".join(map(str, replicas["steps"]))
    about = f"{replicas['copied']} of {replicas['parts']} shards have replicas, after steps {steps}"
    if mismatches:
        return f"replicas differ: {format_difference(max(mismatches, key=get_severity))} ({about})"
    if not replicas["copied"]:
        return f"no replicas to compare ({about})"
    near = f" to {replicas['apart']:.0e}" if replicas["apart"] else ""
    return f"replicas match{near} ({about})"


def format_reference(one: ReferenceProof) -> str:
    """Format the comparison with the reference, with the worst of its differences.

    Example: 'gradients, updates, and norms match the single-process reference to 3e-07 (...)'.
    """
    if one["state"] == "due":
        return f"single-process reference due after step {one['steps']}"
    if one["state"] == "not checked":
        return f"not compared with the single-process reference: {one['why']}"
    figures = _format_differences(one)
    if one["state"] == "apart":
        return f"differs from the single-process reference ({figures})"
    worst = max(one["gradient"], one["update"], one["norm"])
    return f"gradients, updates, and norms match the single-process reference to {worst:.0e} ({figures})"


def format_fp32_reference(exact: ReferenceProof) -> str:
    """Format the second comparison, with an fp32 reference: 'fp32 reference: differences 3e-02 in gradients, ...'."""
    if exact["state"] == "not checked":
        return f"not compared with an fp32 reference: {exact['why']}"
    figures = f"{exact['gradient']:.0e} in gradients, {exact['update']:.0e} in updates, {exact['norm']:.0e} in norms"
    return f"differences from an fp32 reference: {figures}, {exact['loss']:.0e} in losses; {exact['why']}"


def format_end_step(end: ReferenceProof) -> str:
    """Format the extra final step: 'extra final step matches the reference to 3e-07 (...)'."""
    if end["state"] == "not checked":
        return f"extra final step not compared: {end['why']}"
    if end["state"] == "apart":
        return f"extra final step differs from the reference ({_format_differences(end)})"
    worst = max(end["gradient"], end["update"], end["norm"])
    return f"extra final step matches the reference to {worst:.0e} ({_format_differences(end)})"


def _format_differences(one: ReferenceProof) -> str:
    steps = format_count(one["steps"], "step")
    return (
        f"largest differences: gradients of {one['tensors']} tensors {one['gradient']:.0e}, updates "
        f"{one['update']:.0e}, norms {one['norm']:.0e}, losses of {steps} {one['loss']:.0e}; "
        f"computed in {one['seconds']:.1f} s; "
        f"{_format_choices(one['choices']) if 'choices' in one else ''}{one['why']}"
    )


def _format_choices(choices: RouterChoices) -> str:
    """Format the expert choices: 'the reference used the expert choices of the run for 768 tokens, ...'."""
    text = f"the reference used the expert choices of the run for {choices['tokens']} tokens of all layers"
    if not choices["turned"]:
        return f"{text}, which equal its own choices; "
    return f"{text}, {choices['turned']} of which differ from its own choices by at most {choices['gap']:.0e}; "
