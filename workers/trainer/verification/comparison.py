"""How far some steps of a run are from those of one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from contracts.telemetry.results import Mismatch
from planner.facts.single_process_reference import Tolerances
from planner.facts.spec import JobSpec
from workers.trainer.errors import UserError
from workers.trainer.parallel.mesh import Mesh
from workers.trainer.trainer import StepResult
from workers.trainer.verification.reference import Expected, Reference, whole_tensors
from workers.trainer.verification.routing import Compared, moe_layers
from workers.trainer.verification.shards import Piece

T = TypeVar("T")
LEAST_RMS = 1e-30
ROUNDING = 8 * 2.0**-23  # of a loss, in fp32: of one of 1.6e-6 that was learnt by heart, its gradients too, 1 was seen
MOST_ROUNDING = 0.1  # a share of a loss: of what is held against so little nothing can be told
RUNAWAY = 2.0  # times the first step's loss: training that runs away makes anything of rounding, and is not compared


class FirstStep(NamedTuple):
    """What a rank keeps of its own first step, in the order of its pieces: unclipped gradients, updated weights."""

    gradients: list[torch.Tensor]
    weights: list[torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.gradients, *self.weights))


class Ran(NamedTuple):
    """Steps of a run, after the first `done`, on one rank. `validation`: the loss before them, if it is compared."""

    done: int
    first: FirstStep
    results: list[StepResult]
    validation: float | None = None


class Beside(NamedTuple):
    """Largest relative differences of a run from one process, and what of them is more than rounding.

    Losses and norms were compared of `steps`, gradients and updates of the first of them. `failed` says why one
    process could not compute it; then nothing is known. `noted` says why later steps were not compared, and what was
    allowed beyond `Limits`. `choices` are those of routers in these steps, all of the run's, which one process took.
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
    choices: Compared = Compared(0, 0, [])


def compare_with_one(
    spec: JobSpec,
    mesh: Mesh,
    pieces: list[Piece],
    ran: Ran,
    compute: Callable[[], Reference],
    limits: Tolerances,
    device: torch.device,
) -> Beside:
    """All ranks call this together: rank 0 computes and shows each tensor, and every rank holds its part against it."""
    results = ran.results
    reference, failed = on_rank_0(mesh, compute, device)
    if failed:
        return Beside(failed=failed)
    expected = [] if reference is None else [v for r in reference.results for v in (r.loss, r.grad_norm)]
    scalars = _shown(mesh, expected, 2 * len(results), device)
    validation = _shown(mesh, [0.0 if reference is None else reference.validation or 0.0], 1, device)[0]
    choices = _shown_choices(spec, mesh, reference, device)
    if not math.isfinite(scalars[0]):  # and the run's own was a number
        return Beside(1, wrong=_beyond("loss", [f"step {ran.done + 1}"], [math.nan], [0], [limits.loss]))
    noted, results = _comparable(results, scalars[::2], ran.done)
    if not results:
        return Beside(failed=noted)
    losses = [_relative(r.loss, scalars[2 * i]) for i, r in enumerate(results)]
    norms = [_relative(r.grad_norm, scalars[2 * i + 1]) for i, r in enumerate(results[: limits.norm_steps])]
    steps = [f"step {ran.done + i + 1}" for i in range(len(results))]
    loss_limits = [_loss_limit(limits, scalars[0], scalars[2 * i]) for i in range(len(results))]
    norm_limits = [limits.norm + _rounding(scalars[2 * i]) for i in range(len(norms))]
    rounding = _rounding(scalars[0])
    told = steps
    if ran.validation is not None:
        losses.append(_relative(ran.validation, validation))
        loss_limits.append(limits.loss + _rounding(validation))
        told = [*steps, f"validation after step {ran.done}"]
    tensors = list(whole_tensors(spec))
    names = [name for name, _ in tensors]
    routers = [f"layers.{layer}.moe.router" for layer in moe_layers(spec.model)]
    gradient_limits = [_gradient_limit(limits, name, shape) + rounding for name, shape in tensors]
    roundings = dict(zip(names, gradient_limits, strict=True))
    apart = _gathered(mesh, _apart_by_tensor(spec, mesh, pieces, ran.first, reference, roundings, device))
    worst, ranks = (found.tolist() for found in apart.max(0))
    gradients, updates = ([row[column] for row in worst] for column in (0, 1))
    wrong = [
        *_beyond("gradient", names, gradients, [row[0] for row in ranks], gradient_limits),
        *_beyond("update", names, updates, [row[1] for row in ranks], [limits.update + rounding] * len(names)),
        *_beyond("loss", told, losses, [0] * len(told), loss_limits),
        *_beyond("gradient norm", steps[: len(norms)], norms, [0] * len(norms), norm_limits),
        *_beyond("choice", routers, choices.gaps, [0] * len(routers), [limits.router_choice] * len(routers)),
    ]
    if rounding > limits.gradient / 10:
        noted = "; ".join(
            filter(None, (f"the limits are {rounding:.2g} higher because the loss is only {scalars[0]:.2g}", noted))
        )
    gradient, update, loss, norm = map(_largest, (gradients, updates, losses, norms))
    return Beside(len(results), len(names), gradient, update, loss, norm, wrong, noted=noted, choices=choices)


def on_rank_0(mesh: Mesh, work: Callable[[], T], device: torch.device) -> tuple[T | None, str]:
    """What work gives there, and None elsewhere; on all ranks alike whether it failed, and in words why."""
    given, failed = None, ""
    if mesh.rank == 0:
        try:
            given = work()
        except (RuntimeError, MemoryError, UserError) as error:  # out of memory, most likely: no judgement on the run
            failed = f"Single-process reference unavailable: {str(error)[:300]}"
    if _shown(mesh, [float(not failed)], 1, device)[0]:
        return given, ""
    return None, failed or "Single-process reference unavailable on rank 0"


def _gradient_limit(limits: Tolerances, name: str, shape: tuple[int, ...]) -> float:
    if name.endswith("moe.router.weight"):
        return limits.router
    return limits.vector if len(shape) == 1 else limits.gradient


def _loss_limit(limits: Tolerances, first: float, then: float) -> float:
    """Of a step's loss, which one process has come to from that of the first step."""
    return limits.loss + limits.loss_change * _relative(first, then) + _rounding(then)


def _rounding(loss: float) -> float:
    """The share of a loss, and of gradients from it, that is rounding: of a token that is all but certain, both are
    what one less its probability leaves."""
    return ROUNDING / max(abs(loss), LEAST_RMS)


def _shown_choices(spec: JobSpec, mesh: Mesh, reference: Reference | None, device: torch.device) -> Compared:
    """Rank 0's, on every rank."""
    layers = moe_layers(spec.model)
    own = [] if reference is None else [reference.choices.tokens, reference.choices.turned, *reference.choices.gaps]
    tokens, turned, *gaps = _shown(mesh, own, 2 + len(layers), device)
    return Compared(int(tokens), int(turned), gaps)


def _comparable(results: list[StepResult], losses: list[float], done: int) -> tuple[str, list[StepResult]]:
    """The steps before the first that tells nothing by one process' own loss, and in words why the others are not."""
    for index, loss in enumerate(losses):
        step = f"step {done + index + 1}{' and later are' if index else ' is'} not compared"
        if not loss <= RUNAWAY * losses[0]:
            grew = f"the reference loss grew from {losses[0]:.3g} to {loss:.3g}, more than {RUNAWAY:g} times"
            return f"{step}: {grew}", results[:index]
        if _rounding(loss) > MOST_ROUNDING:
            least = ROUNDING / MOST_ROUNDING
            return f"{step}: the loss {loss:.3g} is too small for fp32 (less than {least:.3g})", results[:index]
    return "", results


def _apart_by_tensor(
    spec: JobSpec,
    mesh: Mesh,
    pieces: list[Piece],
    first: FirstStep,
    reference: Reference | None,
    roundings: Mapping[str, float],
    device: torch.device,
) -> torch.Tensor:
    """(tensors, 2) float64: of gradient and weight, this rank's part from one process'; 0 for what it does not hold.

    Of weights only those whose gradient is more than rounding, a share of the tensor's rms: Adam takes a whole step by
    the sign of the others'.
    """
    held: dict[str, list[int]] = {}
    for place, piece in enumerate(pieces):
        held.setdefault(piece.name, []).append(place)
    rows = []
    for name, shape in whole_tensors(spec):
        wanted = _shown_tensor(mesh, None if reference is None else reference.tensors[name], shape, device)
        row = torch.zeros(2, dtype=torch.float64, device=device)
        for place in held.get(name, []):
            slices = pieces[place].box.slices
            told = wanted.gradient[slices]
            gradient = _rms(first.gradients[place].double() - told.double()) / max(wanted.gradient_rms, LEAST_RMS)
            settled = told.abs() > roundings[name] * wanted.gradient_rms
            weights = first.weights[place].double() - wanted.weight[slices].double()
            weight = _rms(weights * settled) / max(wanted.update_rms, LEAST_RMS)
            row = torch.maximum(row, torch.stack((gradient, weight)).nan_to_num(math.inf, posinf=math.inf))
        rows.append(row)
    return torch.stack(rows)


def _rms(apart: torch.Tensor) -> torch.Tensor:
    return apart.square().mean().sqrt()


def _shown_tensor(mesh: Mesh, expected: Expected | None, shape: tuple[int, ...], device: torch.device) -> Expected:
    """What rank 0 expects of a tensor, on every rank."""
    if mesh.layout.world_size == 1:
        assert expected is not None
        return expected
    rms = _shown(mesh, [] if expected is None else [expected.gradient_rms, expected.update_rms], 2, device)
    both = torch.empty((2, *shape), device=device)
    if expected is not None:
        both = torch.stack((expected.gradient.float(), expected.weight.float()))
    dist.broadcast(both, 0)
    return Expected(both[0], both[1], *rms)


def _shown(mesh: Mesh, values: list[float], count: int, device: torch.device) -> list[float]:
    """Numbers of rank 0, on every rank."""
    told = torch.zeros(count, dtype=torch.float64, device=device)
    if mesh.rank == 0:
        told = torch.tensor(values, dtype=torch.float64, device=device)
    if mesh.layout.world_size > 1:
        dist.broadcast(told, 0)
    return list(map(float, told.tolist()))


def _gathered(mesh: Mesh, own: torch.Tensor) -> torch.Tensor:
    """(world, ...) of every rank's own."""
    if mesh.layout.world_size == 1:
        return own.unsqueeze(0)
    every = own.new_empty((mesh.layout.world_size, *own.shape))
    dist.all_gather_single(every.flatten(0, 1), own)
    return every


def _relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(b), LEAST_RMS)


def _largest(values: list[float]) -> float:
    """Of those that are numbers."""
    return max((value for value in values if math.isfinite(value)), default=0.0)


def _beyond(
    what: Literal["gradient", "update", "loss", "gradient norm", "choice"],
    names: list[str],
    values: list[float],
    ranks: list[int],
    limits: list[float],
) -> list[Mismatch]:
    found = []
    for name, value, rank, limit in zip(names, values, ranks, limits, strict=True):
        if not value <= limit:
            told = value if math.isfinite(value) else None
            found.append(Mismatch(what=what, name=name, axis="", ranks=[rank], apart=told, limit=limit))
    return found
