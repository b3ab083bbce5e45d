"""Some steps of a training, computed by one process.

What all ranks hold together between two steps, put into one process: weights and Adam's moments.
"""

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
from workers.trainer.dataset import Corpus
from workers.trainer.model.decoder import full_name
from workers.trainer.optimizer import updates_made
from workers.trainer.parallel.mesh import make_mesh
from workers.trainer.parallel.parallelize import local, parallelize
from workers.trainer.trainer import StepResult, Trainer
from workers.trainer.verification.routing import Compared, Following, Step
from workers.trainer.verification.shards import Piece

# Of the rms of all gradients: what training has left less of is rounding in bf16, and Adam makes anything of it.
FAINT = 0.1
# Of the same before any training: where tokens are all alike, or one stands alone, attention's queries and keys have no
# gradient but rounding, 5e-9 of the others' in fp32, whose limit is 1e-5 of this.
NOUGHT = 1e-2

Fill = Callable[[Trainer], None]


class Expected(NamedTuple):
    """Of one whole tensor: its gradient in the first step, its weights after, and the rms that both are held against.

    An `update_rms` of infinity: nothing is expected of the update.
    """

    gradient: torch.Tensor
    weight: torch.Tensor
    gradient_rms: float
    update_rms: float


class Reference(NamedTuple):
    """`tensors` by their names in the whole model. `validation`: the loss before the first step, if asked for.

    `choices`: the run's, which were followed, beside its own.
    """

    results: list[StepResult]
    tensors: dict[str, Expected]
    validation: float | None
    choices: Compared


def whole_tensors(spec: JobSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of all there are in one process, in order."""
    for unit in get_chunk_units(spec.model, range(spec.model.num_layers), first=True, last=True):
        for parameter in unit.parameters:
            yield full_name(unit, parameter), parameter.shape


def compute(
    spec: JobSpec,
    corpus: Corpus,
    device: torch.device,
    steps: int,
    done: int = 0,
    fill: Fill | None = None,
    chosen: Sequence[Step] = (),
) -> Reference:
    """`steps` after the first `done`, on the same batches, on this rank alone; nothing is sent.

    From the spec's own initial values, or from what `fill` puts into weights and optimiser. Routers choose what a run's
    did in the steps of which `chosen` tells.
    """
    trainer = one_trainer(spec, corpus, device, trained=done > 0)
    if fill is not None:
        fill(trainer)
        trainer.part.follow_masters()  # whatever the run does
    return go_on(trainer, steps, done, chosen)


def go_on(
    trainer: Trainer, steps: int, done: int, chosen: Sequence[Step] = (), *, validates: bool = False
) -> Reference:
    """The same of one process as it stands."""
    validation = trainer.evaluate() if validates else None
    following = Following(trainer, chosen)
    held = trainer.part.tensors
    starts = [h.master.detach().clone() for h in held]
    gradients: list[torch.Tensor] = []
    first = following.step(done, lambda: gradients.extend(h.gradient.clone() for h in held))
    updates = [_norm(h.master.detach() - start) for h, start in zip(held, starts, strict=True)]
    del starts  # no more at once than `why_not_compared` tells of
    weights = [h.master.detach().clone() for h in held]
    results = [first, *(following.step(index) for index in range(done + 1, done + steps))]
    norm = math.sqrt(sum(_norm(gradient) ** 2 for gradient in gradients))
    faint = (FAINT if done else NOUGHT) * norm / math.sqrt(sum(map(torch.numel, gradients)))
    rows = zip(held, gradients, weights, updates, strict=True)
    tensors = {h.name: _expected(h.name, norm, faint, gradient, weight, update) for h, gradient, weight, update in rows}
    return Reference(results, tensors, validation, following.compared)


def one_trainer(spec: JobSpec, corpus: Corpus, device: torch.device, *, trained: bool) -> Trainer:
    """The spec's training on this rank alone, from its own initial values or from those of steps that are done."""
    one = make_reference_spec(spec, trained=trained)
    mesh = make_mesh(one, 0, lambda _group, _axis: None)
    return Trainer(one, mesh, parallelize(one, mesh, device), corpus, Recorder(0), device)


def _expected(
    name: str, norm: float, faint: float, gradient: torch.Tensor, weight: torch.Tensor, update: float
) -> Expected:
    root = math.sqrt(gradient.numel())
    if name.endswith("attention.k.bias"):
        # It has no gradient but rounding, since softmax does not change when all keys move together: what there is
        # counts against the norm of all gradients, and Adam makes anything of it.
        return Expected(gradient, weight, norm / root, math.inf)
    if _norm(gradient) / root < faint:
        return Expected(gradient, weight, faint, math.inf)
    return Expected(gradient, weight, _norm(gradient) / root, update / root)


def _norm(tensor: torch.Tensor) -> float:
    return float(tensor.double().norm())


MOMENTS = ("exp_avg", "exp_avg_sq")


@torch.no_grad()
def make_room(one: Trainer, done: int) -> None:
    """For Adam's moments after `done` steps: what `gather_state` fills, before others wait for it."""
    for held in one.part.tensors:
        moments = {key: torch.empty_like(held.master) for key in MOMENTS}
        one.optimizer.state[held.master] = {"step": updates_made(held.master, done), **moments}


@torch.no_grad()
def gather_state(trainer: Trainer, pieces: list[Piece], one: Trainer | None) -> None:
    """All ranks call this together; rank 0 has `one`, with room, which comes to stand as the run does."""
    held = {h.name: h.master for h in one.part.tensors} if one is not None else {}
    for name, shape in whole_tensors(trainer.spec):
        own = [piece for piece in pieces if piece.name == name]
        weight = _whole(trainer, own, shape, lambda piece: piece.weight)
        moments = [_whole(trainer, own, shape, _moment(trainer, moment)) for moment in MOMENTS]
        if one is None:
            continue
        master = held[name]
        master.copy_(weight)
        for key, value in zip(MOMENTS, moments, strict=True):
            one.optimizer.state[master][key].copy_(value)
    if one is not None:
        one.part.follow_masters()


def _moment(trainer: Trainer, moment: str) -> Callable[[Piece], torch.Tensor]:
    return lambda piece: local(trainer.optimizer.state[piece.held.master][moment])[piece.box.local_slices]


def _whole(
    trainer: Trainer, own: list[Piece], shape: tuple[int, ...], value_of: Callable[[Piece], torch.Tensor]
) -> torch.Tensor:
    """A tensor on rank 0, fp32; of copies, the largest values."""
    whole = torch.full(shape, -math.inf, device=trainer.device)
    for piece in own:
        whole[piece.box.slices] = value_of(piece).float()
    if trainer.mesh.layout.world_size > 1:
        dist.reduce(whole, 0, dist.ReduceOp.MAX)
    return whole
