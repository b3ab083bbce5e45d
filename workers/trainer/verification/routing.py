"""Which experts a run's routers chose, and one process that takes the same.

Rounding may turn a choice between two experts that are nearly equal. The token then trains another expert, which is as
much of a gradient as a fault. So one process follows the run, and its own choice is held against it: by rounding is
what it would have found hardly more probable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from planner.facts.model_shapes import is_moe_layer
from planner.facts.spec import ModelSpec
from workers.trainer.compile import not_compiled
from workers.trainer.model.moe import Router, Routing, routed
from workers.trainer.trainer import StepResult, Trainer

NOBODY = -1
LEAST_SPREAD = 1e-30  # of a router that finds all alike
KEPT = torch.int16  # of at most 4,096 experts

Step = dict[int, torch.Tensor]  # by layer: of the global batch, (sequences, seq, experts a token)


class Compared(NamedTuple):
    """How a run's choices in one step lie beside one process' own.

    `turned` of `tokens` (of all layers) went elsewhere. `gaps` by layer: by how much more probable one process held
    what it would have chosen, the largest difference of logarithms over the rms of all experts' from their mean;
    infinite where a token has one expert twice.
    """

    tokens: int
    turned: int
    gaps: list[float]


class Chosen:
    """Keeps what this rank's routers choose, step after step, while it is `on`."""

    def __init__(self, trainer: Trainer, *, on: bool) -> None:
        self._trainer, self.on = trainer, on
        self._now: dict[tuple[int, int], torch.Tensor] = {}  # by layer and micro-batch
        self._steps: list[dict[tuple[int, int], torch.Tensor]] = []
        for layer, router in routers(trainer):
            router.register_forward_hook(partial(self._see, layer))

    @property
    def num_bytes(self) -> int:
        """Of what is kept."""
        return sum(experts.nbytes for step in (self._now, *self._steps) for experts in step.values())

    def end_step(self) -> None:
        """All micro-batches of a step have gone forward."""
        self._steps.append(self._now)
        self._now = {}

    def take(self) -> list[Step]:
        """The steps that were kept, of all ranks; all call this together."""
        kept = self._steps
        self.drop()
        return [{layer: self._whole(layer, step) for layer in moe_layers(self._trainer.spec.model)} for step in kept]

    def drop(self) -> None:
        """Keep nothing, and nothing more until it is on again."""
        self.on, self._now, self._steps = False, {}, []

    @not_compiled
    def _see(self, layer: int, _router: Router, _inputs: Any, routing: Routing) -> None:
        if self.on:
            self._now[layer, self._trainer.micro_batch] = routing.experts.to(KEPT)

    def _whole(self, layer: int, step: dict[tuple[int, int], torch.Tensor]) -> torch.Tensor:
        spec, mesh, device = self._trainer.spec, self._trainer.mesh, self._trainer.device
        train, layout, moe = spec.train, spec.layout, spec.model.moe
        assert moe is not None
        whole = torch.full(
            (train.global_batch, train.seq_len, moe.experts_per_token), NOBODY, dtype=torch.int32, device=device
        )
        cp = next(iter(self._trainer.part.chunks.values())).strategy.cp
        positions = cp.positions(train.seq_len // layout.cp, device)
        first, size = mesh.place.dp * (train.global_batch // layout.dp), spec.micro_batch_size
        for (kept, micro_batch), experts in step.items():
            if kept == layer:
                begin = first + micro_batch * size
                whole[begin : begin + size, positions] = experts.int()
        if layout.world_size > 1:
            dist.all_reduce(whole, dist.ReduceOp.MAX)
        return whole.to(KEPT)


class Following:
    """One process, whose routers choose in its next steps what a run's did in `steps`.

    Compared are those of the first: only there weights are the same.
    """

    def __init__(self, one: Trainer, steps: Sequence[Step]) -> None:
        self._one, self._steps = one, iter(steps)
        self._step: Step = {}
        self._compares = True
        self._tokens, self._turned = 0, torch.zeros((), dtype=torch.int64, device=one.device)
        self._gaps = {layer: torch.zeros((), device=one.device) for layer in moe_layers(one.spec.model)}
        for layer, router in routers(one):
            router.register_forward_hook(partial(self._follow, layer))

    def step(self, index: int, look: Callable[[], None] | None = None) -> StepResult:
        """As the trainer's."""
        self._step = next(self._steps, {})
        result = self._one.step(index, look)
        self._compares = False
        return result

    @property
    def compared(self) -> Compared:
        return Compared(self._tokens, int(self._turned), [float(gap) for gap in self._gaps.values()])

    def _follow(self, layer: int, _router: Router, inputs: tuple[torch.Tensor], routing: Routing) -> Routing:
        if layer not in self._step:
            return routing
        size = self._one.spec.micro_batch_size
        begin = self._one.micro_batch * size
        kept = self._step[layer][begin : begin + size].long()
        experts = torch.where(kept == NOBODY, routing.experts, kept)
        gates = routing.probabilities.gather(-1, experts)
        if self._compares:
            self._compare(layer, routing, gates, experts)
        return routed(experts, gates, routing.probabilities, inputs[0].dtype)

    def _compare(self, layer: int, own: Routing, gates: torch.Tensor, experts: torch.Tensor) -> None:
        gap = _least(own.probabilities.gather(-1, own.experts)) - _least(gates)
        gap = gap.masked_fill(_has_twice(experts), torch.inf)  # no rounding does it, and the least gate would not tell
        self._tokens += gap.numel()
        self._turned += (gap > 0).sum()
        self._gaps[layer] = torch.maximum(self._gaps[layer], gap.max() / _spread(own.probabilities))


def _log(probabilities: torch.Tensor) -> torch.Tensor:
    """Of what is too small for fp32, of the smallest that is not."""
    return probabilities.detach().clamp_min(torch.finfo(probabilities.dtype).tiny).log()


def _least(probabilities: torch.Tensor) -> torch.Tensor:
    return _log(probabilities).amin(-1)


def _has_twice(experts: torch.Tensor) -> torch.Tensor:
    """Of each token, whether one expert is among its several times."""
    ordered = experts.sort(-1).values
    return (ordered[..., 1:] == ordered[..., :-1]).any(-1)


def _spread(probabilities: torch.Tensor) -> torch.Tensor:
    logs = _log(probabilities)
    return (logs - logs.mean(-1, keepdim=True)).square().mean().sqrt().clamp_min(LEAST_SPREAD)


def moe_layers(model: ModelSpec) -> list[int]:
    """Numbers of the layers that have routers."""
    return [layer for layer in range(model.num_layers) if is_moe_layer(model, layer)]


def routers(trainer: Trainer) -> Iterator[tuple[int, Router]]:
    """(layer in the whole model, its router) of this rank."""
    for decoder in trainer.part.chunks.values():
        for layer, block in decoder.layers.items():
            mixture = getattr(block, "moe", None)
            if mixture is not None:
                yield int(layer), mixture.router
