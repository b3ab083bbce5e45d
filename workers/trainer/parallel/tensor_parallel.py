"""Tensor and sequence parallelism with Megatron's minimum of traffic.

Sources: 2104.04473, section 2.3, and 2205.05198, section 4.2.

A block enters the tp region once before its column-parallel layers, and leaves it once after its row-parallel layer. So
a layer has two sums in forward and two in backward, which overlap with weight gradients. Hidden states are (batch, seq,
hidden). With sequence parallelism they are (batch, seq/tp, hidden) between blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from workers.torch_private.kernels import look_up
from workers.trainer.compile import exclude_from_compile
from workers.trainer.parallel.matmul import UNQUANTIZED, Matmuls, split_parameters

SEQ_DIM = 1


def _all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


@exclude_from_compile
def _gather_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather (batch, seq/tp, hidden) -> (batch, seq, hidden)."""
    parts = x.new_empty((group.size(), *x.shape))
    dist.all_gather_single(parts.flatten(0, 1), x.contiguous(), group=group)
    return parts.movedim(0, SEQ_DIM).flatten(SEQ_DIM, SEQ_DIM + 1)


def _scatter_sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Reduce-scatter (batch, seq, hidden) -> (batch, seq/tp, hidden)."""
    out, work = _start_scatter_sum(x, group)
    work.wait()
    return out


def _start_scatter_sum(x: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work]:
    """Start a reduce-scatter. The result is valid after the wait."""
    parts = x.unflatten(SEQ_DIM, (group.size(), -1)).movedim(SEQ_DIM, 0).contiguous()
    out = torch.empty_like(parts[0])
    work = dist.reduce_scatter_single(out, parts.flatten(0, 1), group=group, async_op=True)
    assert work is not None
    return out, work


def _start_all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work]:
    """Start an all-reduce in place."""
    work = dist.all_reduce(x, group=group, async_op=True)
    assert work is not None
    return x, work


class ParallelInput(NamedTuple):
    """Store the input of half a layer: `part` of this rank, and the gathered `whole` outside autograd."""

    part: torch.Tensor
    whole: torch.Tensor


class _Enter(torch.autograd.Function):
    """Replace `part` with `whole`. Backward sums the gradients of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup, sequence_parallel: bool
    ) -> torch.Tensor:
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        collective = _scatter_sum if ctx.sequence_parallel else _all_reduce
        return collective(grad, ctx.group), None, None, None


class _Columns(torch.autograd.Function):
    """Column-parallel matmuls of one input.

    Backward sums the input gradient over the group while it computes the weight gradients, like Megatron-LM. Weights
    (out/tp, in) come first, followed by the biases or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        part: torch.Tensor,
        whole: torch.Tensor,
        group: dist.ProcessGroup,
        sequence_parallel: bool,
        matmuls: Matmuls,
        *parameters: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = split_parameters(parameters)
        ctx.group, ctx.sequence_parallel, ctx.matmuls = group, sequence_parallel, matmuls
        ctx.biased = [bias is not None for bias in biases]
        ctx.save_for_backward(whole, *weights)
        return matmuls.outputs(whole, weights, biases)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        whole, *weights = ctx.saved_tensors
        flat = [grad.flatten(0, -2) for grad in grads]
        rows = [ctx.matmuls.quantize_gradient(row) for row in flat]
        start = _start_scatter_sum if ctx.sequence_parallel else _start_all_reduce
        part_grad, work = start(ctx.matmuls.input_gradient(rows, weights).view_as(whole), ctx.group)
        weight_grads = ctx.matmuls.weight_gradients(rows, whole.flatten(0, -2))
        bias_grads = [row.sum(0) if biased else None for row, biased in zip(flat, ctx.biased, strict=True)]
        work.wait()
        return part_grad, None, None, None, None, *weight_grads, *bias_grads


class _Leave(torch.autograd.Function):
    """Sum the partial outputs of a row-parallel matmul."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, sequence_parallel: bool) -> torch.Tensor:
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        return _scatter_sum(x, group) if sequence_parallel else _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return (_gather_sequence(grad, ctx.group) if ctx.sequence_parallel else grad), None, None


@exclude_from_compile
def _sending(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)


class _VocabCrossEntropy(torch.autograd.Function):
    """Cross-entropy over a vocabulary that is split over the group, as in Megatron-LM."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup, vocab_size: int
    ) -> torch.Tensor:
        first = group.rank() * logits.shape[-1]
        filled = min(max(0, vocab_size - first), logits.shape[-1])
        largest = logits[:, :filled].amax(-1) if filled else logits.new_full(targets.shape, -torch.inf)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = logits - largest.unsqueeze(-1)
        shifted[:, filled:] = -torch.inf
        exponentials = shifted.exp()
        normaliser = exponentials.sum(-1)
        dist.all_reduce(normaliser, group=group)
        local = targets - first
        mine = (local >= 0) & (local < logits.shape[-1])
        local = local.clamp(0, logits.shape[-1] - 1)
        # Padding is minus infinity, so a product with zero would be NaN.
        target_logit = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0)
        dist.all_reduce(target_logit, group=group)
        ctx.save_for_backward(exponentials.div_(normaliser.unsqueeze(-1)), local, mine)
        return (normaliser.log() - target_logit).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        softmax, local, mine = ctx.saved_tensors
        result = softmax.clone()
        result.scatter_add_(-1, local.unsqueeze(-1), -mine.to(result.dtype).unsqueeze(-1))
        return result * grad, None, None, None


@dataclass(frozen=True)
class TensorParallel:
    """Configure tensor parallelism. `group` is None if tp is 1."""

    group: dist.ProcessGroup | None
    degree: int = 1
    index: int = 0
    sequence_parallel: bool = False

    def enter(self, x: torch.Tensor) -> ParallelInput:
        """Return the input of column-parallel matmuls, (batch, seq[/tp], hidden) and (batch, seq, hidden)."""
        return ParallelInput(x, x if self.group is None else self.gathered(x.detach()))

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Gather the sequence outside autograd."""
        return _gather_sequence(x, self.group) if self.group is not None and self.sequence_parallel else x

    def entered(self, x: ParallelInput) -> torch.Tensor:
        """Return the whole input for operations other than matmuls."""
        if self.group is None:
            return x.part
        return _sending(_Enter, *x, self.group, self.sequence_parallel)  # type: ignore[no-any-return]

    def columns(
        self,
        x: ParallelInput,
        weights: list[torch.Tensor],
        biases: list[torch.Tensor | None],
        matmuls: Matmuls = UNQUANTIZED,
    ) -> list[torch.Tensor]:
        """Return x W^T + b for each weight, (batch, seq, out/tp)."""
        assert self.group is not None
        return list(_sending(_Columns, *x, self.group, self.sequence_parallel, matmuls, *weights, *biases))

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Sum partial outputs: (batch, seq, hidden) -> (batch, seq[/tp], hidden)."""
        if self.group is None:
            return x
        return _sending(_Leave, x, self.group, self.sequence_parallel)  # type: ignore[no-any-return]

    def embed(self, tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Look up tokens (batch, seq) in this rank's rows (vocab/tp, hidden) -> (batch, seq[/tp], hidden)."""
        if self.group is None:
            return look_up(tokens, table)
        local = tokens - self.index * table.shape[0]
        mine = (local >= 0) & (local < table.shape[0])
        partial = look_up(local.clamp(0, table.shape[0] - 1), table) * mine.unsqueeze(-1)
        return self.leave(partial)

    def sequence_part(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part along the sequence, or the whole tensor without sequence parallelism."""
        return x.chunk(self.degree, dim)[self.index] if self.sequence_parallel else x

    def flat_part(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the flattened tensor, (numel/tp,)."""
        return x.flatten().chunk(self.degree)[self.index]

    def from_flat_parts(self, part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Gather a tensor from the flat parts of all ranks."""
        if self.group is None:
            return part.view(shape)
        whole = part.new_empty(part.numel() * self.degree)
        dist.all_gather_single(whole, part, group=self.group)
        return whole.view(shape)

    def loss_sum(self, logits: torch.Tensor, targets: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Return the summed cross-entropy in fp32, for logits (batch, seq, local rows), targets (batch, seq)."""
        flat, flat_targets = logits.flatten(0, 1).float(), targets.flatten()
        if self.group is None:
            return F.cross_entropy(flat, flat_targets, reduction="sum")
        return _VocabCrossEntropy.apply(flat, flat_targets, self.group, vocab_size)  # type: ignore[no-any-return]
