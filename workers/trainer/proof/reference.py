"""The first steps of a training, computed by one process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from planner.facts.models.shapes import stage_units
from planner.facts.proof import alone
from planner.facts.spec import JobSpec
from workers.meter.recorder import Recorder
from workers.trainer.corpus.data import Corpus
from workers.trainer.loop import StepResult, Trainer
from workers.trainer.model.initial import full_name
from workers.trainer.parallel.mesh import make_mesh
from workers.trainer.parallel.parallelize import parallelize


class Expected(NamedTuple):
    """Of one whole tensor: its gradient in the first step, its weights after, and the rms that both are held against.

    An `update_rms` of infinity: nothing is expected of the update.
    """

    gradient: torch.Tensor
    weight: torch.Tensor
    gradient_rms: float
    update_rms: float


class Reference(NamedTuple):
    """`tensors` by their names in the whole model."""

    results: list[StepResult]
    tensors: dict[str, Expected]


def whole_tensors(spec: JobSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of all there are in one process, in order."""
    for unit in stage_units(spec.model, range(spec.model.num_layers), first=True, last=True):
        for parameter in unit.parameters:
            yield full_name(unit, parameter), parameter.shape


def compute(spec: JobSpec, corpus: Corpus, device: torch.device, steps: int) -> Reference:
    """The same initial values and batches as the spec's own run, on this rank alone; nothing is sent."""
    one = alone(spec)
    mesh = make_mesh(one, 0, lambda _group, _axis: None)
    trainer = Trainer(one, mesh, parallelize(one, mesh, device), corpus, Recorder(0), device)
    held = trainer.part.tensors
    starts = [h.master.detach().clone() for h in held]
    gradients: list[torch.Tensor] = []
    first = trainer.step(0, lambda: gradients.extend(h.gradient.clone() for h in held))
    weights = [h.master.detach().clone() for h in held]
    results = [first, *(trainer.step(index) for index in range(1, steps))]
    norm = math.sqrt(sum(_norm(gradient) ** 2 for gradient in gradients))
    rows = zip(held, starts, gradients, weights, strict=True)
    return Reference(results, {h.name: _expected(h.name, norm, *rest) for h, *rest in rows})


def _expected(name: str, norm: float, start: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor) -> Expected:
    root = math.sqrt(gradient.numel())
    if name.endswith("attention.k.bias"):
        # It has no gradient but rounding, since softmax does not change when all keys move together: what there is
        # counts against the norm of all gradients, and Adam makes anything of it.
        return Expected(gradient, weight, norm / root, math.inf)
    return Expected(gradient, weight, _norm(gradient) / root, _norm(weight - start) / root)


def _norm(tensor: torch.Tensor) -> float:
    return float(tensor.double().norm())
