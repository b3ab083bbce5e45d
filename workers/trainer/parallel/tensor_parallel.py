"""Tensor and sequence parallelism at Megatron's minimum of traffic (2104.04473 section 2.3, 2205.05198 section 4.2).

A block enters its column-parallel products once and leaves its row-parallel one once, so a layer costs two sums
forward and two backward, which travel while weight gradients are computed. Hidden states are (batch, seq, hidden);
under sequence parallelism each rank holds (batch, seq/tp, hidden) between blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from workers.torch_private.kernels import look_up
from workers.trainer.compile import not_compiled
from workers.trainer.parallel.matmul import WIDE, Products, halves

SEQ_DIM = 1


def _all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


@not_compiled
def _gather_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(batch, seq/tp, hidden) -> (batch, seq, hidden)"""
    parts = x.new_empty((group.size(), *x.shape))
    dist.all_gather_single(parts.flatten(0, 1), x.contiguous(), group=group)
    return parts.movedim(0, SEQ_DIM).flatten(SEQ_DIM, SEQ_DIM + 1)


def _scatter_sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(batch, seq, hidden) -> (batch, seq/tp, hidden), summed over the group"""
    out, work = _start_scatter_sum(x, group)
    work.wait()
    return out


def _start_scatter_sum(x: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work]:
    """What it will be, once it has been waited for."""
    parts = x.unflatten(SEQ_DIM, (group.size(), -1)).movedim(SEQ_DIM, 0).contiguous()
    out = torch.empty_like(parts[0])
    work = dist.reduce_scatter_single(out, parts.flatten(0, 1), group=group, async_op=True)
    assert work is not None
    return out, work


def _start_all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work]:
    """In place."""
    work = dist.all_reduce(x, group=group, async_op=True)
    assert work is not None
    return x, work


class Entered(NamedTuple):
    """What enters a half of a layer: `part` as this rank has it, and `whole`, outside autograd, as products need it."""

    part: torch.Tensor
    whole: torch.Tensor


class _Enter(torch.autograd.Function):
    """`whole` as what `part` became: every rank needs the whole input, and its gradient is their sum."""

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
    """Column-parallel products of one input. Backward sums the input's gradient over the group while it computes the
    weights' (2104.04473's code: asynchronous all-reduce of the input gradient).

    `weights` come first, (out/tp, in) each, then as many biases or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        part: torch.Tensor,
        whole: torch.Tensor,
        group: dist.ProcessGroup,
        sequence_parallel: bool,
        products: Products,
        *parameters: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = halves(parameters)
        ctx.group, ctx.sequence_parallel, ctx.products = group, sequence_parallel, products
        ctx.biased = [bias is not None for bias in biases]
        ctx.save_for_backward(whole, *weights)
        return products.outputs(whole, weights, biases)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        whole, *weights = ctx.saved_tensors
        flat = [grad.flatten(0, -2) for grad in grads]
        rows = [ctx.products.gradient(row) for row in flat]
        start = _start_scatter_sum if ctx.sequence_parallel else _start_all_reduce
        part_grad, work = start(ctx.products.input_gradient(rows, weights).view_as(whole), ctx.group)
        weight_grads = ctx.products.weight_gradients(rows, whole.flatten(0, -2))
        bias_grads = [row.sum(0) if biased else None for row, biased in zip(flat, ctx.biased, strict=True)]
        work.wait()
        return part_grad, None, None, None, None, *weight_grads, *bias_grads


class _Leave(torch.autograd.Function):
    """After a row-parallel product: sum the partial outputs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, sequence_parallel: bool) -> torch.Tensor:
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        return _scatter_sum(x, group) if sequence_parallel else _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return (_gather_sequence(grad, ctx.group) if ctx.sequence_parallel else grad), None, None


@not_compiled
def _sending(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)


class _VocabCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropy with logits divided over the vocabulary; the logits are never gathered.

    logits (tokens, rows) fp32, targets (tokens,). Three sums of (tokens,): maximum, normaliser, target logit. Rows from
    `vocab_size` on, over all ranks, are padding: no share of the softmax is theirs.
    """

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
        # Padding holds minus infinity, which no zero takes away.
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
    """What a block needs to know of tp. `group` is None when tp is 1, and then nothing is sent."""

    group: dist.ProcessGroup | None
    degree: int = 1
    index: int = 0
    sequence_parallel: bool = False

    def enter(self, x: torch.Tensor) -> Entered:
        """Input of column-parallel products: (batch, seq[/tp], hidden), whole (batch, seq, hidden)."""
        return Entered(x, x if self.group is None else self.gathered(x.detach()))

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sequence as the whole, outside autograd."""
        return _gather_sequence(x, self.group) if self.group is not None and self.sequence_parallel else x

    def entered(self, x: Entered) -> torch.Tensor:
        """The whole input, for what is no product."""
        if self.group is None:
            return x.part
        return _sending(_Enter, *x, self.group, self.sequence_parallel)  # type: ignore[no-any-return]

    def columns(
        self, x: Entered, weights: list[torch.Tensor], biases: list[torch.Tensor | None], products: Products = WIDE
    ) -> list[torch.Tensor]:
        """x W^T + b of each, (batch, seq, out/tp)."""
        assert self.group is not None
        return list(_sending(_Columns, *x, self.group, self.sequence_parallel, products, *weights, *biases))

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Partial sums of a row-parallel product: (batch, seq, hidden) -> (batch, seq[/tp], hidden)."""
        if self.group is None:
            return x
        return _sending(_Leave, x, self.group, self.sequence_parallel)  # type: ignore[no-any-return]

    def embed(self, tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Look tokens (batch, seq) up in this rank's rows, (vocab/tp, hidden) -> (batch, seq[/tp], hidden)."""
        if self.group is None:
            return look_up(tokens, table)
        local = tokens - self.index * table.shape[0]
        mine = (local >= 0) & (local < table.shape[0])
        partial = look_up(local.clamp(0, table.shape[0] - 1), table) * mine.unsqueeze(-1)
        return self.leave(partial)

    def sequence_part(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of a tensor over positions under sequence parallelism, all of it otherwise."""
        return x.chunk(self.degree, dim)[self.index] if self.sequence_parallel else x

    def flat_part(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's run of a tensor's elements, (numel/tp,)."""
        return x.flatten().chunk(self.degree)[self.index]

    def from_flat_parts(self, part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The tensor of which each rank has its run of elements."""
        if self.group is None:
            return part.view(shape)
        whole = part.new_empty(part.numel() * self.degree)
        dist.all_gather_single(whole, part, group=self.group)
        return whole.view(shape)

    def loss_sum(self, logits: torch.Tensor, targets: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Sum of cross-entropy in fp32. logits (batch, seq, rows of this rank), targets (batch, seq)."""
        flat, wanted = logits.flatten(0, 1).float(), targets.flatten()
        if self.group is None:
            return F.cross_entropy(flat, wanted, reduction="sum")
        return _VocabCrossEntropy.apply(flat, wanted, self.group, vocab_size)  # type: ignore[no-any-return]
