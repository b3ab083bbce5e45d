"""Mixture of experts in place of an MLP (GShard 2006.16668, Switch 2101.03961, Mixtral 2401.04088).

Grouped matmuls are custom operators: one operation in forward, two in backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import register_flop_formula

from planner.facts.model_parts import MoeSpec
from planner.facts.model_shapes import get_expert_capacity
from planner.facts.spec import ModelSpec
from workers.trainer.model.layers import Linear, Mlp, Strategy, activate, read_parameter
from workers.trainer.parallel.tensor_parallel import ParallelInput

ALIGNED_BYTES = 16  # alignment of rows in torch's grouped kernel
GPU_GENERATION = 8


@torch.library.custom_op("meshboard::grouped_product", mutates_args=())
def grouped_product(rows: torch.Tensor, matrices: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Multiply each run of `counts` rows with its matrix: (rows, in), (runs, out, in) -> (rows, out)."""
    if _takes_kernel(rows, matrices.shape[1:]):
        return F.grouped_mm(rows.contiguous(), matrices.transpose(-1, -2), offs=_ends(counts, rows.device))
    out = rows.new_empty(len(rows), matrices.shape[1])
    for run, matrix, into in zip(rows.split(counts), matrices, out.split(counts), strict=True):
        torch.mm(run, matrix.T, out=into)
    return out


@torch.library.custom_op("meshboard::grouped_outer", mutates_args=())
def grouped_outer(left: torch.Tensor, right: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Multiply runs of `left` and `right`: (rows, out), (rows, in) -> (runs, out, in)."""
    if _takes_kernel(left, (left.shape[1], right.shape[1])):
        product = F.grouped_mm(left.contiguous().T, right.contiguous(), offs=_ends(counts, left.device))
        for run, count in enumerate(counts):
            if not count:
                product[run].zero_()  # On some GPUs, the kernel does not write empty runs (pytorch issue 172439).
        return product
    out = left.new_empty(len(counts), left.shape[1], right.shape[1])
    for a, b, into in zip(left.split(counts), right.split(counts), out, strict=True):
        torch.mm(a.T, b, out=into)
    return out


def _takes_kernel(rows: torch.Tensor, sizes: tuple[int, ...] | torch.Size) -> bool:
    if any(size * rows.element_size() % ALIGNED_BYTES for size in sizes):
        return False
    if not rows.is_cuda:
        return True
    return rows.dtype == torch.bfloat16 and torch.cuda.get_device_capability(rows.device)[0] >= GPU_GENERATION


def _ends(counts: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).to(device, torch.int32)


@grouped_product.register_fake
def _product_shape(rows: torch.Tensor, matrices: torch.Tensor, counts: list[int]) -> torch.Tensor:
    return rows.new_empty(len(rows), matrices.shape[1])


@grouped_outer.register_fake
def _outer_shape(left: torch.Tensor, right: torch.Tensor, counts: list[int]) -> torch.Tensor:
    return left.new_empty(len(counts), left.shape[1], right.shape[1])


def _keep(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor, list[int]], output: torch.Tensor) -> None:
    rows, matrices, ctx.counts = inputs
    ctx.save_for_backward(rows, matrices)


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    rows, matrices = ctx.saved_tensors
    return grouped_product(grad, matrices.transpose(-1, -2), ctx.counts), grouped_outer(grad, rows, ctx.counts), None


grouped_product.register_autograd(_gradients, setup_context=_keep)


@register_flop_formula(torch.ops.meshboard.grouped_product)
def _product_flops(rows: Any, matrices: Any, counts: Any, out_shape: Any = None, **_: Any) -> int:
    return 2 * int(rows[0]) * int(matrices[1]) * int(matrices[2])


@register_flop_formula(torch.ops.meshboard.grouped_outer)
def _outer_flops(left: Any, right: Any, counts: Any, out_shape: Any = None, **_: Any) -> int:
    return 2 * int(left[0]) * int(left[1]) * int(right[1])


class Routing(NamedTuple):
    """Store the experts and gates of each token, (batch, seq, experts per token).

    `probabilities` of all experts are (batch, seq, experts), fp32.
    """

    experts: torch.Tensor
    gates: torch.Tensor
    probabilities: torch.Tensor


class Router(Linear):
    """Select the most probable experts of each token, in fp32."""

    def __init__(self, model: ModelSpec, moe: MoeSpec, strategy: Strategy) -> None:
        super().__init__(moe.num_experts, model.hidden_size, False, strategy)
        self.experts_per_token = moe.experts_per_token

    def forward(self, x: torch.Tensor) -> Routing:  # type: ignore[override]  # what nn.Module calls
        """Map hidden states (batch, seq, hidden) to a routing."""
        probabilities = super().forward(x.float()).softmax(-1)
        gates, experts = probabilities.topk(self.experts_per_token, dim=-1)
        return make_routing(experts, gates, probabilities, x.dtype)


def make_routing(
    experts: torch.Tensor, gates: torch.Tensor, probabilities: torch.Tensor, dtype: torch.dtype
) -> Routing:
    """Normalize the gates (batch, seq, experts per token). The gate of a single expert is not normalized."""
    if experts.shape[-1] > 1:
        gates = gates / gates.sum(-1, keepdim=True)
    return Routing(experts, gates.to(dtype), probabilities)


class MixtureOfExperts(nn.Module):
    """Router, the experts of this ep rank, and shared experts that process every token."""

    def __init__(self, model: ModelSpec, moe: MoeSpec, strategy: Strategy) -> None:
        super().__init__()
        self.router = Router(model, moe, strategy)
        self.experts = Experts(model, moe, strategy)
        inner = moe.shared_experts * moe.expert_ffn_hidden_size
        self.shared = Mlp(model, inner, strategy) if inner else None
        self.spec, self.strategy = moe, strategy

    def forward(self, entered: ParallelInput) -> torch.Tensor:
        """Return partial sums of the output, (batch, seq, hidden)."""
        x = self.strategy.tp.entered(entered)
        routing = self.router(x)
        capacity = get_expert_capacity(self.spec, x.shape[1] * self.strategy.cp.degree)
        out = (
            self._forward_dropless(x, routing)
            if capacity is None
            else self._forward_with_capacity(x, routing, capacity)
        )
        if self.shared is not None:
            out = out + self.shared.forward_within_tp(x)
        if not (torch.is_grad_enabled() and self.spec.balance_loss):
            return out
        return _AddLoss.apply(out, self._compute_balance_loss(routing), self.strategy.balance_scale)  # type: ignore[no-any-return]

    def _compute_balance_loss(self, routing: Routing) -> torch.Tensor:
        """Return the load-balancing loss, summed over sequences, 1 per sequence for an even distribution.

        The loss is per sequence, so it does not depend on ranks and micro-batches. Source: 2412.19437, equations 17 to
        20.
        """
        moe, cp = self.spec, self.strategy.cp
        seq_len = routing.experts.shape[1] * cp.degree
        chosen = F.one_hot(routing.experts, moe.num_experts).sum((1, 2)).float()
        share = cp.sum(chosen) * (moe.num_experts / (moe.experts_per_token * seq_len))
        return (share * routing.probabilities.sum(1) / seq_len).sum()

    def _forward_dropless(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Send each token to all of its experts."""
        ep, k = self.strategy.ep, self.spec.experts_per_token
        selected = routing.experts.flatten()
        order = selected.argsort(stable=True)
        counts = selected.new_zeros(self.spec.num_experts).scatter_add_(0, selected, torch.ones_like(selected))
        plan = ep.plan(counts, len(selected))
        back = _inverse(order)
        arrived = ep.exchange(_Take.apply(x.flatten(0, 1), order, back, k), plan.sent, plan.received)
        rows = [sum(of_expert) for of_expert in zip(*plan.arriving, strict=True)]
        if ep.degree == 1:
            outputs = self.experts(arrived, rows)
        else:  # Rows arrive by rank, then by expert. Each expert processes the rows of all ranks at once.
            by_expert = _order_by_expert(plan.arriving, x.device)
            by_rank = _inverse(by_expert)
            outputs = self.experts(_Take.apply(arrived, by_expert, by_rank, 1), rows)
            outputs = _Take.apply(outputs, by_rank, by_expert, 1)
        outputs_by_token = _Take.apply(ep.exchange(outputs, plan.received, plan.sent), back, order, 1)
        return _combine(outputs_by_token.unflatten(0, (*x.shape[:2], k)), routing.gates)

    def _forward_with_capacity(self, x: torch.Tensor, routing: Routing, capacity: int) -> torch.Tensor:
        """Send at most `capacity` tokens of a sequence to an expert, in order. Buffers have a fixed size."""
        ep, moe, (batch, seq_len, hidden) = self.strategy.ep, self.spec, x.shape
        selected = routing.experts.flatten(1)
        order = (F.one_hot(selected, moe.num_experts).cumsum(1) - 1).gather(-1, selected.unsqueeze(-1)).squeeze(-1)
        sequence = torch.arange(batch, device=x.device).unsqueeze(-1)
        slots = moe.num_experts * batch * capacity
        slot = torch.where(order < capacity, (selected * batch + sequence) * capacity + order, slots).flatten()
        rows = x.repeat_interleave(moe.experts_per_token, 1).flatten(0, 1)
        sent = x.new_zeros(slots + 1, hidden).index_add(0, slot, rows)[:slots]  # The last slot collects dropped tokens.
        share = [slots // ep.degree] * ep.degree
        ep.received.rows += slots
        arrived = ep.exchange(sent, share, share).unflatten(0, (ep.degree, moe.num_experts // ep.degree, -1))
        local, run = arrived.shape[1], ep.degree * batch * capacity
        outputs = self.experts(arrived.transpose(0, 1).reshape(-1, hidden), [run] * local)
        back = outputs.unflatten(0, (local, ep.degree, -1)).transpose(0, 1).reshape(-1, hidden)
        outputs_by_token = torch.cat((ep.exchange(back, share, share), x.new_zeros(1, hidden)))
        return _combine(outputs_by_token[slot].unflatten(0, (batch, seq_len, moe.experts_per_token)), routing.gates)


class Experts(nn.Module):
    """Experts of this rank with SwiGLU, over this rank's columns."""

    def __init__(self, model: ModelSpec, moe: MoeSpec, strategy: Strategy) -> None:
        super().__init__()
        local, inner = moe.num_experts // strategy.ep.degree, moe.expert_ffn_hidden_size // strategy.tp.degree
        self.gate = ExpertMatrices(local, inner, model.hidden_size, strategy)
        self.up = ExpertMatrices(local, inner, model.hidden_size, strategy)
        self.down = ExpertMatrices(local, model.hidden_size, inner, strategy)

    def forward(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Map rows (rows, hidden), in runs of `counts` per expert, to partial sums of the outputs."""
        gate, up, down = (part(rows.dtype) for part in (self.gate, self.up, self.down))
        inner = activate(grouped_product(rows, gate, counts), grouped_product(rows, up, counts))
        outputs: torch.Tensor = grouped_product(inner, down, counts)
        return outputs


class ExpertMatrices(nn.Module):
    """One matrix per expert, (experts, out, in)."""

    def __init__(self, experts: int, out_size: int, in_size: int, strategy: Strategy) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out_size, in_size))
        self.strategy = strategy

    def forward(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrices (experts, out, in) in the compute dtype."""
        return read_parameter(self.weight, self.strategy).to(dtype)


class _Take(torch.autograd.Function):
    """Reorder rows, each repeated `times` times: row i is `x[index[i] // times]`. `inverse` reverts `index`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor, times: int) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.times = times
        return x.index_select(0, index // times)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        whole = grad.index_select(0, inverse)
        return whole if ctx.times == 1 else whole.unflatten(0, (-1, ctx.times)).sum(1), None, None, None


def _inverse(order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _order_by_expert(arriving: list[list[int]], device: torch.device) -> torch.Tensor:
    """Return the permutation from (rank, expert) order to (expert, rank) order."""
    sizes = torch.tensor(arriving)
    starts = (sizes.flatten().cumsum(0).view_as(sizes) - sizes).T.flatten()
    sizes = sizes.T.flatten()
    rows = sum(map(sum, arriving))
    moved = torch.repeat_interleave(starts - (sizes.cumsum(0) - sizes), sizes, output_size=rows)
    return (torch.arange(rows) + moved).to(device)


class _AddLoss(torch.autograd.Function):
    """Return `out` unchanged. Backward also minimizes `loss` times `scale`."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, loss: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = loss.new_tensor(scale)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grad, ctx.scale, None


def _combine(outputs_by_token: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Weight outputs (batch, seq, k, hidden) with gates (batch, seq, k) -> (batch, seq, hidden)."""
    return (outputs_by_token * gates.unsqueeze(-1)).sum(2)
