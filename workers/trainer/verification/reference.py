"""Compute steps of a training run in a single process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from planner.facts.model_shapes import get_chunk_units
from planner.facts.single_process_reference import make_reference_spec
from planner.facts.spec import JobSpec
from workers.meter.recorder import Recorder
from workers.trainer.dataset import TokenDataset
from workers.trainer.model.decoder import get_full_name
from workers.trainer.optimizer import make_step_count
from workers.trainer.parallel.mesh import build_mesh
from workers.trainer.parallel.parallelize import get_local
from workers.trainer.trainer import StepResult, Trainer
from workers.trainer.verification.routing import RoutingComparison, RoutingReplay, Step
from workers.trainer.verification.shards import TensorShard

# fraction of the rms of all gradients; smaller gradients are rounding in bf16 after training
MIN_RELATIVE_GRADIENT = 0.1
# The same fraction before training. Without distinct tokens, queries and keys have no gradient except
# rounding, 5e-9 of the other gradients in fp32. The limit is 1e-5 of this fraction.
MIN_RELATIVE_FIRST_GRADIENT = 1e-2

Fill = Callable[[Trainer], None]


class ExpectedTensor(NamedTuple):
    """Store the gradient of a whole tensor in the first step, the weight after it, and their scales.

    If `update_rms` is infinite, the update is not compared.
    """

    gradient: torch.Tensor
    weight: torch.Tensor
    gradient_rms: float
    update_rms: float


class ReferenceRun(NamedTuple):
    """Store the results of a reference. `tensors` are keyed by full name.

    `validation` is the eval loss before the first step. `choices` compares the routing of the run with its own routing.
    """

    results: list[StepResult]
    tensors: dict[str, ExpectedTensor]
    validation: float | None
    choices: RoutingComparison


def iter_model_tensors(spec: JobSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of all tensors of the whole model, in order."""
    for unit in get_chunk_units(spec.model, range(spec.model.num_layers), first=True, last=True):
        for parameter in unit.parameters:
            yield get_full_name(unit, parameter), parameter.shape


def compute_reference(
    spec: JobSpec,
    corpus: TokenDataset,
    device: torch.device,
    steps: int,
    done: int = 0,
    fill: Fill | None = None,
    choices: Sequence[Step] = (),
) -> ReferenceRun:
    """Compute `steps` steps after the first `done`, on the same batches, on this rank alone.

    The reference starts from the initial values, or from the state that `fill` loads. Routers replay `choices`.
    """
    trainer = build_reference_trainer(spec, corpus, device, trained=done > 0)
    if fill is not None:
        fill(trainer)
        trainer.model.copy_masters_to_weights()  # independent of the run
    return continue_reference(trainer, steps, done, choices)


def continue_reference(
    trainer: Trainer, steps: int, done: int, choices: Sequence[Step] = (), *, validates: bool = False
) -> ReferenceRun:
    """Compute steps with an existing reference trainer."""
    validation = trainer.evaluate() if validates else None
    replay = RoutingReplay(trainer, choices)
    masters = trainer.model.parameters
    starts = [h.master.detach().clone() for h in masters]
    gradients: list[torch.Tensor] = []
    first = replay.train_step(done, lambda: gradients.extend(h.gradient.clone() for h in masters))
    updates = [_norm(h.master.detach() - start) for h, start in zip(masters, starts, strict=True)]
    del starts  # limits the memory to the estimate of `explain_no_reference`
    weights = [h.master.detach().clone() for h in masters]
    results = [first, *(replay.train_step(index) for index in range(done + 1, done + steps))]
    norm = math.sqrt(sum(_norm(gradient) ** 2 for gradient in gradients))
    min_rms = (
        (MIN_RELATIVE_GRADIENT if done else MIN_RELATIVE_FIRST_GRADIENT)
        * norm
        / math.sqrt(sum(map(torch.numel, gradients)))
    )
    rows = zip(masters, gradients, weights, updates, strict=True)
    tensors = {
        h.name: _make_expected(h.name, norm, min_rms, gradient, weight, update) for h, gradient, weight, update in rows
    }
    return ReferenceRun(results, tensors, validation, replay.compared)


def build_reference_trainer(spec: JobSpec, corpus: TokenDataset, device: torch.device, *, trained: bool) -> Trainer:
    """Build a trainer of the whole model on this rank."""
    reference_trainer = make_reference_spec(spec, trained=trained)
    mesh = build_mesh(reference_trainer, 0, lambda _group, _axis: None)
    return Trainer.build(reference_trainer, mesh, corpus, Recorder(0), device)


def _make_expected(
    name: str, norm: float, min_rms: float, gradient: torch.Tensor, weight: torch.Tensor, update: float
) -> ExpectedTensor:
    root = math.sqrt(gradient.numel())
    if name.endswith("attention.k.bias"):
        # Softmax does not change if all keys move together, so this gradient is only rounding.
        # It is compared with the norm of all gradients, and its update is not compared.
        return ExpectedTensor(gradient, weight, norm / root, math.inf)
    if _norm(gradient) / root < min_rms:
        return ExpectedTensor(gradient, weight, min_rms, math.inf)
    return ExpectedTensor(gradient, weight, _norm(gradient) / root, update / root)


def _norm(tensor: torch.Tensor) -> float:
    return float(tensor.double().norm())


MOMENTS = ("exp_avg", "exp_avg_sq")


@torch.no_grad()
def allocate_moments(reference_trainer: Trainer, done: int) -> None:
    """Allocate Adam's moments after `done` steps, before other ranks wait for `gather_state`."""
    for masters in reference_trainer.model.parameters:
        moments = {key: torch.empty_like(masters.master) for key in MOMENTS}
        reference_trainer.optimizer.state[masters.master] = {"step": make_step_count(masters.master, done), **moments}


@torch.no_grad()
def gather_state(trainer: Trainer, shards: list[TensorShard], reference_trainer: Trainer | None) -> None:
    """Gather weights and moments of all ranks into rank 0's reference trainer. All ranks call this together."""
    masters = {h.name: h.master for h in reference_trainer.model.parameters} if reference_trainer is not None else {}
    for name, shape in iter_model_tensors(trainer.spec):
        shards_of_tensor = [shard for shard in shards if shard.name == name]
        weight = _gather_tensor(trainer, shards_of_tensor, shape, lambda shard: shard.weight)
        moments = [_gather_tensor(trainer, shards_of_tensor, shape, _get_moment(trainer, moment)) for moment in MOMENTS]
        if reference_trainer is None:
            continue
        master = masters[name]
        master.copy_(weight)
        for key, value in zip(MOMENTS, moments, strict=True):
            reference_trainer.optimizer.state[master][key].copy_(value)
    if reference_trainer is not None:
        reference_trainer.model.copy_masters_to_weights()


def _get_moment(trainer: Trainer, moment: str) -> Callable[[TensorShard], torch.Tensor]:
    return lambda shard: get_local(trainer.optimizer.state[shard.parameter.master][moment])[shard.box.local_slices]


def _gather_tensor(
    trainer: Trainer,
    shards_of_tensor: list[TensorShard],
    shape: tuple[int, ...],
    get_value: Callable[[TensorShard], torch.Tensor],
) -> torch.Tensor:
    """Gather a whole tensor on rank 0, fp32. Replicas are merged by their maximum."""
    whole = torch.full(shape, -math.inf, device=trainer.device)
    for shard in shards_of_tensor:
        whole[shard.box.slices] = get_value(shard).float()
    if trainer.mesh.layout.world_size > 1:
        dist.reduce(whole, 0, dist.ReduceOp.MAX)
    return whole
