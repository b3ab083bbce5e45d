"""A trainer's state as boxes: weights and Adam's moments, by the names of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from planner.facts.layout import Coordinates
from planner.facts.spec import JobSpec
from planner.facts.tensors.boxes import held_box
from workers.checkpoint.boxes import Boxed, State
from workers.trainer.optimizer import updates_made
from workers.trainer.parallel.parallelize import Held, Part, local

MOMENTS = ("exp_avg", "exp_avg_sq")


def model_state(spec: JobSpec, place: Coordinates, part: Part) -> State:
    """This rank's part of every weight. A table tied to the embedding has the embedding's name."""
    return _boxes(spec, place, part, "model", lambda held: local(held.master.detach()))


def optimizer_state(spec: JobSpec, place: Coordinates, part: Part, optimizer: torch.optim.Optimizer) -> State:
    """This rank's part of Adam's moments, made if there were none yet."""
    found: State = {}
    for moment in MOMENTS:
        found |= _boxes(spec, place, part, moment, partial(_moment, optimizer, moment))
    return found


def set_steps(part: Part, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Tell Adam how many updates it has made."""
    for held in part.tensors:
        optimizer.state[held.master]["step"] = updates_made(held.master, step)


def copy_tied(spec: JobSpec, part: Part, optimizer: torch.optim.Optimizer) -> None:
    """Where both ends of a pipe are here, the head takes what was loaded for the embedding."""
    by_name = {held.name: held.master for held in part.tensors}
    if not (spec.model.tied_embeddings and {"embedding.weight", "head.weight"} <= by_name.keys()):
        return
    embedding, head = by_name["embedding.weight"], by_name["head.weight"]
    with torch.no_grad():
        local(head).copy_(local(embedding))
        for moment in MOMENTS:
            local(optimizer.state[head][moment]).copy_(local(optimizer.state[embedding][moment]))


def _moment(optimizer: torch.optim.Optimizer, moment: str, held: Held) -> torch.Tensor:
    state = optimizer.state[held.master]
    if moment not in state:
        state[moment] = torch.zeros_like(held.master, memory_format=torch.preserve_format)
    return local(state[moment])


def _boxes(
    spec: JobSpec, place: Coordinates, part: Part, prefix: str, tensor_of: Callable[[Held], torch.Tensor]
) -> State:
    found: State = {}
    for held in part.tensors:
        name = "embedding.weight" if held.name == "head.weight" and spec.model.tied_embeddings else held.name
        box = held_box(spec, place, held.spec)
        tensor = tensor_of(held)
        if box.numel:
            found.setdefault(f"{prefix}.{name}", Boxed(tensor[box.filled], box, held.spec.shape))
    return found
