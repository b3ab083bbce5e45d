"""Record the expert choices of a run, and replay them in the single-process reference.

Rounding can change the choice between two experts with almost equal probability. Then the token trains another expert,
and gradients differ as much as after a fault. So the reference replays the choices of the run, and compares them with
its own choices. A choice that differs by rounding has almost the same probability.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from planner.facts.model_shapes import is_moe_layer
from planner.facts.spec import ModelSpec
from workers.trainer.compile import exclude_from_compile
from workers.trainer.model.moe import Router, Routing, make_routing
from workers.trainer.trainer import StepResult, Trainer

MISSING = -1
MIN_SPREAD = 1e-30  # of a router with equal probabilities
EXPERT_DTYPE = torch.int16  # for at most 4,096 experts

Step = dict[int, torch.Tensor]  # by layer: (sequences, seq, experts per token) of the global batch


class RoutingComparison(NamedTuple):
    """Compare choices of a run in one step with choices of the reference.

    `turned` of `tokens` (summed over layers) have different experts. `gaps` per layer is the largest difference of
    log-probabilities, relative to the rms of all log-probabilities. It is infinite if a token has an expert twice.
    """

    tokens: int
    turned: int
    gaps: list[float]


class RoutingRecorder:
    """Record the choices of this rank's routers while `on` is true."""

    def __init__(self, trainer: Trainer, *, on: bool) -> None:
        self._trainer, self.on = trainer, on
        self._current: dict[tuple[int, int], torch.Tensor] = {}  # by layer and micro-batch
        self._steps: list[dict[tuple[int, int], torch.Tensor]] = []
        for layer, router in iter_routers(trainer):
            router.register_forward_hook(partial(self._record, layer))

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the recorded choices."""
        return sum(experts.nbytes for step in (self._current, *self._steps) for experts in step.values())

    def end_step(self) -> None:
        """Finish the record of a step."""
        self._steps.append(self._current)
        self._current = {}

    def take(self) -> list[Step]:
        """Return the recorded steps of all ranks, and stop recording. All ranks call this together."""
        recorded = self._steps
        self.drop()
        return [
            {layer: self._gather_layer(layer, step) for layer in list_moe_layers(self._trainer.spec.model)}
            for step in recorded
        ]

    def drop(self) -> None:
        """Discard the recorded choices, and stop recording."""
        self.on, self._current, self._steps = False, {}, []

    @exclude_from_compile
    def _record(self, layer: int, _router: Router, _inputs: Any, routing: Routing) -> None:
        if self.on:
            self._current[layer, self._trainer.current_micro_batch] = routing.experts.to(EXPERT_DTYPE)

    def _gather_layer(self, layer: int, step: dict[tuple[int, int], torch.Tensor]) -> torch.Tensor:
        spec, mesh, device = self._trainer.spec, self._trainer.mesh, self._trainer.device
        train, layout, moe = spec.train, spec.layout, spec.model.moe
        assert moe is not None
        whole = torch.full(
            (train.global_batch, train.seq_len, moe.experts_per_token), MISSING, dtype=torch.int32, device=device
        )
        cp = next(iter(self._trainer.model.chunks.values())).strategy.cp
        positions = cp.positions(train.seq_len // layout.cp, device)
        first, size = mesh.coordinates.dp * (train.global_batch // layout.dp), spec.micro_batch_size
        for (recorded, micro_batch), experts in step.items():
            if recorded == layer:
                begin = first + micro_batch * size
                whole[begin : begin + size, positions] = experts.int()
        if layout.world_size > 1:
            dist.all_reduce(whole, dist.ReduceOp.MAX)
        return whole.to(EXPERT_DTYPE)


class RoutingReplay:
    """Replay the choices of a run in the next steps of the reference.

    Only choices of the first step are compared, because later weights differ.
    """

    def __init__(self, trainer: Trainer, steps: Sequence[Step]) -> None:
        self._trainer, self._steps = trainer, iter(steps)
        self._step: Step = {}
        self._compares = True
        self._tokens, self._changed = 0, torch.zeros((), dtype=torch.int64, device=trainer.device)
        self._gaps = {layer: torch.zeros((), device=trainer.device) for layer in list_moe_layers(trainer.spec.model)}
        for layer, router in iter_routers(trainer):
            router.register_forward_hook(partial(self._replay, layer))

    def train_step(self, index: int, inspect: Callable[[], None] | None = None) -> StepResult:
        """Run a training step with the recorded choices."""
        self._step = next(self._steps, {})
        result = self._trainer.train_step(index, inspect)
        self._compares = False
        return result

    @property
    def compared(self) -> RoutingComparison:
        return RoutingComparison(self._tokens, int(self._changed), [float(gap) for gap in self._gaps.values()])

    def _replay(self, layer: int, _router: Router, inputs: tuple[torch.Tensor], routing: Routing) -> Routing:
        if layer not in self._step:
            return routing
        size = self._trainer.spec.micro_batch_size
        begin = self._trainer.current_micro_batch * size
        recorded = self._step[layer][begin : begin + size].long()
        experts = torch.where(recorded == MISSING, routing.experts, recorded)
        gates = routing.probabilities.gather(-1, experts)
        if self._compares:
            self._compare(layer, routing, gates, experts)
        return make_routing(experts, gates, routing.probabilities, inputs[0].dtype)

    def _compare(self, layer: int, own: Routing, gates: torch.Tensor, experts: torch.Tensor) -> None:
        gap = _min_log(own.probabilities.gather(-1, own.experts)) - _min_log(gates)
        gap = gap.masked_fill(
            _has_duplicate(experts), torch.inf
        )  # Rounding never causes this, and the smallest gate would not show it.
        self._tokens += gap.numel()
        self._changed += (gap > 0).sum()
        self._gaps[layer] = torch.maximum(self._gaps[layer], gap.max() / _get_log_spread(own.probabilities))


def _log(probabilities: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities. Values that underflow in fp32 count as the smallest positive number."""
    return probabilities.detach().clamp_min(torch.finfo(probabilities.dtype).tiny).log()


def _min_log(probabilities: torch.Tensor) -> torch.Tensor:
    return _log(probabilities).amin(-1)


def _has_duplicate(experts: torch.Tensor) -> torch.Tensor:
    """Return whether a token has an expert twice."""
    ordered = experts.sort(-1).values
    return (ordered[..., 1:] == ordered[..., :-1]).any(-1)


def _get_log_spread(probabilities: torch.Tensor) -> torch.Tensor:
    logs = _log(probabilities)
    return (logs - logs.mean(-1, keepdim=True)).square().mean().sqrt().clamp_min(MIN_SPREAD)


def list_moe_layers(model: ModelSpec) -> list[int]:
    """Return the numbers of the layers with routers."""
    return [layer for layer in range(model.num_layers) if is_moe_layer(model, layer)]


def iter_routers(trainer: Trainer) -> Iterator[tuple[int, Router]]:
    """Yield (layer number, router) of this rank."""
    for decoder in trainer.model.chunks.values():
        for layer, block in decoder.layers.items():
            mixture = getattr(block, "moe", None)
            if mixture is not None:
                yield int(layer), mixture.router
