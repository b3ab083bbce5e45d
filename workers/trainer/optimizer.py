"""AdamW, the learning rate schedule, and the gradient steps between backward and update."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from planner.facts.spec import JobSpec, Layout, TrainSpec
from workers.torch_private.compiler import AdamW
from workers.trainer.parallel.mesh import Mesh
from workers.trainer.parallel.parallelize import ModelShard, ShardedParameter, is_sharded, is_tied

BETAS = (0.9, 0.95)
FINAL_LR_FRACTION = 0.1
MAX_CONVERTED_ELEMENTS = 2**24
SUM_CHUNK = 2**12


def build_optimizer(model: ModelShard, train: TrainSpec) -> torch.optim.Optimizer:
    """Create AdamW over this rank's shards, with weight decay on matrices only (GPT-3, appendix B)."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = defaultdict(list)
    for parameter in model.get_masters():
        # The fused kernel does not mix DTensors and plain tensors. With ZeRO, experts that ep shards are plain tensors.
        groups[parameter.ndim >= 2, is_sharded(parameter)].append(parameter)
    settings = [
        {"params": parameters, "weight_decay": train.weight_decay if is_matrix else 0.0}
        for (is_matrix, _), parameters in groups.items()
    ]
    return AdamW(settings, lr=train.learning_rate, betas=BETAS, fused=True)


def make_step_count(master: torch.Tensor, count: int) -> torch.Tensor:
    """Return Adam's update count as a tensor. The fused kernel expects it on the device of the parameter."""
    return torch.tensor(float(count), device=master.device)


def get_learning_rate(step: int, train: TrainSpec) -> float:
    """Return the rate of step `step` (from 0): linear warmup, then a cosine decay to a tenth."""
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    share = FINAL_LR_FRACTION + (1 - FINAL_LR_FRACTION) * 0.5 * (1 + math.cos(math.pi * done))
    return train.learning_rate * share


def update_weights(model: ModelShard, optimizer: torch.optim.Optimizer) -> None:
    """Run the optimizer and free the gradients. bf16 gradients are converted to fp32 in groups."""
    groups: list[list[ShardedParameter]] = [[]]
    filled = 0
    for p in model.parameters:
        if p.gradient_holder is p.master:
            continue
        if filled + p.weight.numel() > MAX_CONVERTED_ELEMENTS:
            groups.append([])
            filled = 0
        groups[-1].append(p)
        filled += p.weight.numel()
    for group in groups:
        for p in group:
            p.master.grad, p.weight.grad = p.gradient.float(), None
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.copy_masters_to_weights()


def reduce_shared_gradients(spec: JobSpec, model: ModelShard, mesh: Mesh) -> None:
    """Sum gradients that data parallelism does not cover.

    These are gradients of tensors that tp ranks share, and of the embedding that the first and last stage tie.
    """
    if mesh.tp is not None:
        _sum_flat([p for p in model.parameters if is_partial_over_tp(p, spec.layout)], mesh.tp)
    if mesh.key_values is not None:
        _sum_flat([p for p in model.parameters if p.is_replicated_over_tp], mesh.key_values)
    tied = [p.gradient for p in model.parameters if is_tied(spec, p.spec)]
    if len(tied) == 2:  # With a V schedule, this rank has the first and the last chunk.
        tied[0].copy_(tied[1].add_(tied[0]))
    elif tied:
        dist.all_reduce(tied[0], group=mesh.embedding)


def is_partial_over_tp(p: ShardedParameter, layout: Layout) -> bool:
    """Return whether each tp rank has only a partial gradient of a replicated tensor.

    With sequence parallelism, each rank computes with its part of the sequence. A router's gradient comes from the
    experts, and each rank has some of their columns.
    """
    return p.placement.tp is None and (layout.sequence_parallel or ".router." in p.name)


def _sum_flat(tensors: list[ShardedParameter], group: dist.ProcessGroup) -> None:
    if not tensors:
        return
    gradients = [p.gradient for p in tensors]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def compute_gradient_square_sum(model: ModelShard) -> torch.Tensor:
    """Return this rank's term of the squared gradient norm, (), float64.

    A tensor with k replicas counts 1/k on each. The sum over all ranks is the squared norm of a single process.
    """
    gradients: dict[int, list[torch.Tensor]] = defaultdict(list)
    for p in model.parameters:
        gradients[p.num_replicas].append(p.gradient)
    return torch.stack([compute_square_sum(alike) / copies for copies, alike in gradients.items()]).sum()


def compute_square_sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of tensors, (), float64.

    Chunks are short enough to sum in fp32, which takes 1% of the time of `x.double()`. The host blocks a GPU here, so
    each tensor takes at most two kernels.
    """
    norms = []
    for x in tensors:
        flat = x.flatten()
        whole = flat.numel() // SUM_CHUNK * SUM_CHUNK
        norms += [
            torch.linalg.vector_norm(runs, dim=1, dtype=torch.float32)
            for runs in (flat[:whole].view(-1, SUM_CHUNK), flat[whole:].view(1, -1))
            if runs.numel() or not flat.numel()
        ]
    return torch.cat(norms).double().square().sum()


def clip_gradients(model: ModelShard, norm: float, limit: float) -> None:
    """Scale all gradients so that the global norm is at most `limit`. 0 means no limit."""
    if not limit or norm <= limit:
        return
    for p in model.parameters:
        p.gradient.mul_(limit / norm)
