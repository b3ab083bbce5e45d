"""What all ranks hold together between two steps, put into one process: weights and Adam's moments."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from workers.trainer.loop import Trainer
from workers.trainer.optimizer import updates_made
from workers.trainer.parallel.parallelize import local
from workers.trainer.proof.parts import Piece
from workers.trainer.proof.reference import whole_tensors

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
    return lambda piece: local(trainer.optimizer.state[piece.held.master][moment])[piece.box.filled]


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
