"""Compute steps of a training run in a single process, with the expert choices of the run.

Rounding can change the choice between two experts with almost equal probability. Then the token trains another expert,
and gradients differ as much as after a fault. So the reference replays the choices of the run, and compares them with
its own choices. A choice that differs by rounding has almost the same probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from planner.facts.model_shapes import is_moe_layer
from planner.facts.single_process_reference import make_reference_spec
from planner.facts.spec import JobSpec, ModelSpec, Precision
from workers.meter.recorder import Recorder
from workers.trainer.compile import exclude_from_compile
from workers.trainer.dataset import TokenDataset
from workers.trainer.model.decoder import iter_model_parameters
from workers.trainer.model.moe import Router, Routing, make_routing
from workers.trainer.optimizer import make_step_count
from workers.trainer.parallel.mesh import build_mesh
from workers.trainer.parallel.parallelize import get_local
from workers.trainer.trainer import StepResult, Trainer
from workers.trainer.verification.replicas import TensorShard

# fraction of the rms of all gradients; smaller gradients are rounding in bf16 after training
MIN_RELATIVE_GRADIENT = 0.1
# The same fraction before training. Without distinct tokens, queries and keys have no gradient except
# rounding, 5e-9 of the other gradients in fp32. The limit is 1e-5 of this fraction.
MIN_RELATIVE_FIRST_GRADIENT = 1e-2

Fill = Callable[[Trainer], None]
MOMENTS = ("exp_avg", "exp_avg_sq")
MISSING = -1
MIN_SPREAD = 1e-30  # of a router with equal probabilities
EXPERT_DTYPE = torch.int16  # for at most 4,096 experts
Step = dict[int, torch.Tensor]  # by layer: (sequences, seq, experts per token) of the global batch


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


def compute_reference(
    spec: JobSpec,
    corpus: TokenDataset,
    device: torch.device,
    steps: int,
    done: int = 0,
    fill: Fill | None = None,
    choices: Sequence[Step] = (),
    precision: Precision | None = None,
) -> ReferenceRun:
    """Compute `steps` steps after the first `done`, on the same batches, on this rank alone.

    The reference starts from the initial values, or from the state that `fill` loads. Routers replay `choices`.
    """
    trainer = build_reference_trainer(spec, corpus, device, precision)
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
    fraction = MIN_RELATIVE_GRADIENT if done else MIN_RELATIVE_FIRST_GRADIENT
    min_rms = fraction * norm / math.sqrt(sum(map(torch.numel, gradients)))
    rows = zip(masters, gradients, weights, updates, strict=True)
    tensors = {
        h.name: _make_expected(h.name, norm, min_rms, gradient, weight, update) for h, gradient, weight, update in rows
    }
    return ReferenceRun(results, tensors, validation, replay.compared)


def build_reference_trainer(
    spec: JobSpec, corpus: TokenDataset, device: torch.device, precision: Precision | None = None
) -> Trainer:
    """Build a trainer of the whole model on this rank, by default in the precision of the run."""
    reference_trainer = make_reference_spec(spec, precision)
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
    for name, parameter in iter_model_parameters(trainer.spec.model):
        shape = parameter.shape
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
        gap = _log(own.probabilities.gather(-1, own.experts)).amin(-1) - _log(gates).amin(-1)
        ordered = experts.sort(-1).values
        # A token that has an expert twice. Rounding never causes this, and the smallest gate would not show it.
        gap = gap.masked_fill((ordered[..., 1:] == ordered[..., :-1]).any(-1), torch.inf)
        logs = _log(own.probabilities)
        spread = (logs - logs.mean(-1, keepdim=True)).square().mean().sqrt().clamp_min(MIN_SPREAD)
        self._tokens += gap.numel()
        self._changed += (gap > 0).sum()
        self._gaps[layer] = torch.maximum(self._gaps[layer], gap.max() / spread)


def _log(probabilities: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities. Values that underflow in fp32 count as the smallest positive number."""
    return probabilities.detach().clamp_min(torch.finfo(probabilities.dtype).tiny).log()


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
