"""AdamW, warm-up and cosine, and what must happen to gradients between the last backward and the update."""

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
from workers.trainer.parallel.parallelize import Held, Part, is_sharded, is_tied

BETAS = (0.9, 0.95)
FINAL_LR_SHARE = 0.1
CONVERTED_ELEMENTS = 2**24
RUN = 2**12


def make_optimizer(part: Part, train: TrainSpec) -> torch.optim.Optimizer:
    """AdamW over this rank's shards; weight decay on matrices only (GPT-3 appendix B)."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = defaultdict(list)
    for parameter in part.masters():
        # The fused kernel takes sharded tensors or whole ones, never both: ZeRO leaves experts whole that ep divides.
        groups[parameter.ndim >= 2, is_sharded(parameter)].append(parameter)
    settings = [
        {"params": parameters, "weight_decay": train.weight_decay if is_matrix else 0.0}
        for (is_matrix, _), parameters in groups.items()
    ]
    return AdamW(settings, lr=train.learning_rate, betas=BETAS, fused=True)


def updates_made(master: torch.Tensor, count: int) -> torch.Tensor:
    """Adam's count of a tensor's updates. The fused kernel takes it from where the tensor is."""
    return torch.tensor(float(count), device=master.device)


def learning_rate(step: int, train: TrainSpec) -> float:
    """Rate of step `step` (from 0): linear warm-up, then a cosine to a tenth, which one step more would have."""
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    share = FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * done))
    return train.learning_rate * share


def update(part: Part, optimizer: torch.optim.Optimizer) -> None:
    """One step of the optimiser. Gradients in bf16 become fp32 some at a time; none is left afterwards."""
    waiting: list[list[Held]] = [[]]
    filled = 0
    for held in part.tensors:
        if held.summed is held.master:
            continue
        if filled + held.tensor.numel() > CONVERTED_ELEMENTS:
            waiting.append([])
            filled = 0
        waiting[-1].append(held)
        filled += held.tensor.numel()
    for some in waiting:
        for held in some:
            held.master.grad, held.tensor.grad = held.gradient.float(), None
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    part.follow_masters()


def finish_gradients(spec: JobSpec, part: Part, mesh: Mesh) -> None:
    """Sum what data parallelism could not: tensors that tp ranks share, and the table tied across stages."""
    if mesh.tp is not None:
        _sum_flat([held for held in part.tensors if is_partial_over_tp(held, spec.layout)], mesh.tp)
    if mesh.key_values is not None:
        _sum_flat([held for held in part.tensors if held.copied_by_tp_neighbours], mesh.key_values)
    tied = [held.gradient for held in part.tensors if is_tied(spec, held.spec)]
    if len(tied) == 2:  # both ends of a V are on this rank
        tied[0].copy_(tied[1].add_(tied[0]))
    elif tied:
        dist.all_reduce(tied[0], group=mesh.embedding)


def is_partial_over_tp(held: Held, layout: Layout) -> bool:
    """Whether each tp rank has only its part of the gradient of a tensor that all hold.

    Under sequence parallelism each computed with its part of the sequence. A router is corrected by what comes back
    from the experts, of whose columns each rank has some.
    """
    return held.placement.tp is None and (layout.sequence_parallel or ".router." in held.name)


def _sum_flat(tensors: list[Held], group: dist.ProcessGroup) -> None:
    if not tensors:
        return
    gradients = [held.gradient for held in tensors]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def gradient_square_sum(part: Part) -> torch.Tensor:
    """This rank's share of the squared gradient norm, float64: what k ranks hold alike counts 1/k on each.

    The sum over the world is the square of the norm a single process would see.
    """
    gradients: dict[int, list[torch.Tensor]] = defaultdict(list)
    for held in part.tensors:
        gradients[held.copies].append(held.gradient)
    return torch.stack([square_sum(alike) / copies for copies, alike in gradients.items()]).sum()


def square_sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of all of them, float64: runs short enough for fp32, then their sums. A hundredth of the time of x.double().

    A GPU waits for its host here, so that a tensor takes two kernels at most, and all of them share the rest.
    """
    norms = []
    for x in tensors:
        flat = x.flatten()
        whole = flat.numel() // RUN * RUN
        norms += [
            torch.linalg.vector_norm(runs, dim=1, dtype=torch.float32)
            for runs in (flat[:whole].view(-1, RUN), flat[whole:].view(1, -1))
            if runs.numel() or not flat.numel()
        ]
    return torch.cat(norms).double().square().sum()


def clip_gradients(part: Part, norm: float, limit: float) -> None:
    """Scale every gradient so that the global norm is at most `limit`; 0 means no limit."""
    if not limit or norm <= limit:
        return
    for held in part.tensors:
        held.gradient.mul_(limit / norm)
