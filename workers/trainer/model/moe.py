"""Products of runs of rows, each with a matrix of its own, as one operation forward and two backward.

A mixture of experts in place of one MLP (GShard 2006.16668, Switch 2101.03961, Mixtral 2401.04088).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import register_flop_formula

from planner.facts.model_shapes import get_expert_capacity
from planner.facts.spec import ModelSpec, MoeSpec
from workers.trainer.model.layers import Linear, Mlp, Strategy, activate, use
from workers.trainer.parallel.tensor_parallel import Entered

ALIGNED_BYTES = 16  # torch's grouped kernel takes no other rows
GPU_GENERATION = 8


@torch.library.custom_op("meshboard::grouped_product", mutates_args=())
def grouped_product(rows: torch.Tensor, matrices: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """(rows, in) in runs of `counts`, (runs, out, in) -> (rows, out): each run times its matrix, transposed."""
    if _takes_kernel(rows, matrices.shape[1:]):
        return F.grouped_mm(rows.contiguous(), matrices.transpose(-1, -2), offs=_ends(counts, rows.device))
    out = rows.new_empty(len(rows), matrices.shape[1])
    for run, matrix, into in zip(rows.split(counts), matrices, out.split(counts), strict=True):
        torch.mm(run, matrix.T, out=into)
    return out


@torch.library.custom_op("meshboard::grouped_outer", mutates_args=())
def grouped_outer(left: torch.Tensor, right: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """(rows, out), (rows, in) -> (runs, out, in): each run of the one, transposed, times that of the other."""
    if _takes_kernel(left, (left.shape[1], right.shape[1])):
        product = F.grouped_mm(left.contiguous().T, right.contiguous(), offs=_ends(counts, left.device))
        for run, count in enumerate(counts):
            if not count:
                product[run].zero_()  # on some GPUs the kernel leaves there what was in memory (pytorch 172439)
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
    """Where each token goes and what each answer counts: `experts` and `gates` (batch, seq, experts a token).

    `probabilities` of all experts, (batch, seq, experts), fp32.
    """

    experts: torch.Tensor
    gates: torch.Tensor
    probabilities: torch.Tensor


class Router(Linear):
    """The most probable experts of each token, in fp32."""

    def __init__(self, model: ModelSpec, moe: MoeSpec, strategy: Strategy) -> None:
        super().__init__(moe.num_experts, model.hidden_size, False, strategy)
        self.experts_per_token = moe.experts_per_token

    def forward(self, x: torch.Tensor) -> Routing:  # type: ignore[override]  # what nn.Module calls
        """(batch, seq, hidden) -> where each token goes"""
        probabilities = super().forward(x.float()).softmax(-1)
        gates, experts = probabilities.topk(self.experts_per_token, dim=-1)
        return routed(experts, gates, probabilities, x.dtype)


def routed(experts: torch.Tensor, gates: torch.Tensor, probabilities: torch.Tensor, dtype: torch.dtype) -> Routing:
    """Several experts share a token by their probabilities, a single one keeps its own. `gates` are those of `experts`,
    (batch, seq, experts a token)."""
    if experts.shape[-1] > 1:
        gates = gates / gates.sum(-1, keepdim=True)
    return Routing(experts, gates.to(dtype), probabilities)


class Mixture(nn.Module):
    """A router, experts of which ep leaves this rank some, and shared experts that every token visits."""

    def __init__(self, model: ModelSpec, moe: MoeSpec, strategy: Strategy) -> None:
        super().__init__()
        self.router = Router(model, moe, strategy)
        self.experts = Experts(model, moe, strategy)
        inner = moe.shared_experts * moe.expert_ffn_hidden_size
        self.shared = Mlp(model, inner, strategy) if inner else None
        self.spec, self.strategy = moe, strategy

    def forward(self, entered: Entered) -> torch.Tensor:
        """Partial sums of the output, (batch, seq, hidden)"""
        x = self.strategy.tp.entered(entered)
        routing = self.router(x)
        capacity = get_expert_capacity(self.spec, x.shape[1] * self.strategy.cp.degree)
        out = self._dropless(x, routing) if capacity is None else self._dropping(x, routing, capacity)
        if self.shared is not None:
            out = out + self.shared.within(x)
        if not (torch.is_grad_enabled() and self.spec.balance_loss):
            return out
        return _AlsoMinimise.apply(out, self._imbalance(routing), self.strategy.balance_scale)  # type: ignore[no-any-return]

    def _imbalance(self, routing: Routing) -> torch.Tensor:
        """Sum over sequences of the load-balancing loss, 1 each when tokens spread evenly (2412.19437 eq 17 to 20).

        A sequence's own: so it does not depend on how sequences are dealt to ranks and micro-batches.
        """
        moe, cp = self.spec, self.strategy.cp
        seq_len = routing.experts.shape[1] * cp.degree
        chosen = F.one_hot(routing.experts, moe.num_experts).sum((1, 2)).float()
        share = cp.sum(chosen) * (moe.num_experts / (moe.experts_per_token * seq_len))
        return (share * routing.probabilities.sum(1) / seq_len).sum()

    def _dropless(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Each token to each of its experts, however many come."""
        ep, k = self.strategy.ep, self.spec.experts_per_token
        wanted = routing.experts.flatten()
        order = wanted.argsort(stable=True)
        counts = wanted.new_zeros(self.spec.num_experts).scatter_add_(0, wanted, torch.ones_like(wanted))
        plan = ep.plan(counts, len(wanted))
        back = _inverse(order)
        arrived = ep.exchange(_Take.apply(x.flatten(0, 1), order, back, k), plan.sent, plan.received)
        rows = [sum(of_expert) for of_expert in zip(*plan.arriving, strict=True)]
        if ep.degree == 1:
            outputs = self.experts(arrived, rows)
        else:  # rows come by rank, each rank's by expert; an expert takes its rows of all ranks at once
            by_expert = _by_expert(plan.arriving, x.device)
            by_rank = _inverse(by_expert)
            outputs = self.experts(_Take.apply(arrived, by_expert, by_rank, 1), rows)
            outputs = _Take.apply(outputs, by_rank, by_expert, 1)
        answers = _Take.apply(ep.exchange(outputs, plan.received, plan.sent), back, order, 1)
        return _mean(answers.unflatten(0, (*x.shape[:2], k)), routing.gates)

    def _dropping(self, x: torch.Tensor, routing: Routing, capacity: int) -> torch.Tensor:
        """At most `capacity` tokens of a sequence to an expert, the first to come; buffers have one size always."""
        ep, moe, (batch, seq_len, hidden) = self.strategy.ep, self.spec, x.shape
        wanted = routing.experts.flatten(1)
        order = (F.one_hot(wanted, moe.num_experts).cumsum(1) - 1).gather(-1, wanted.unsqueeze(-1)).squeeze(-1)
        sequence = torch.arange(batch, device=x.device).unsqueeze(-1)
        slots = moe.num_experts * batch * capacity
        slot = torch.where(order < capacity, (wanted * batch + sequence) * capacity + order, slots).flatten()
        rows = x.repeat_interleave(moe.experts_per_token, 1).flatten(0, 1)
        sent = x.new_zeros(slots + 1, hidden).index_add(0, slot, rows)[:slots]  # the last slot takes what is dropped
        share = [slots // ep.degree] * ep.degree
        ep.received.rows += slots
        arrived = ep.exchange(sent, share, share).unflatten(0, (ep.degree, moe.num_experts // ep.degree, -1))
        local, run = arrived.shape[1], ep.degree * batch * capacity
        outputs = self.experts(arrived.transpose(0, 1).reshape(-1, hidden), [run] * local)
        back = outputs.unflatten(0, (local, ep.degree, -1)).transpose(0, 1).reshape(-1, hidden)
        answers = torch.cat((ep.exchange(back, share, share), x.new_zeros(1, hidden)))
        return _mean(answers[slot].unflatten(0, (batch, seq_len, moe.experts_per_token)), routing.gates)


class Experts(nn.Module):
    """This rank's experts, over its columns: SwiGLU each."""

    def __init__(self, model: ModelSpec, moe: MoeSpec, strategy: Strategy) -> None:
        super().__init__()
        local, inner = moe.num_experts // strategy.ep.degree, moe.expert_ffn_hidden_size // strategy.tp.degree
        self.gate = Matrices(local, inner, model.hidden_size, strategy)
        self.up = Matrices(local, inner, model.hidden_size, strategy)
        self.down = Matrices(local, model.hidden_size, inner, strategy)

    def forward(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """(rows, hidden) in runs of `counts`, one an expert -> partial sums of their outputs"""
        gate, up, down = (part(rows.dtype) for part in (self.gate, self.up, self.down))
        inner = activate(grouped_product(rows, gate, counts), grouped_product(rows, up, counts))
        outputs: torch.Tensor = grouped_product(inner, down, counts)
        return outputs


class Matrices(nn.Module):
    """One matrix an expert: weight (experts, out, in)."""

    def __init__(self, experts: int, out_size: int, in_size: int, strategy: Strategy) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out_size, in_size))
        self.strategy = strategy

    def forward(self, dtype: torch.dtype) -> torch.Tensor:
        """(experts, out, in) in the compute type"""
        return use(self.weight, self.strategy).to(dtype)


class _Take(torch.autograd.Function):
    """Rows in another order, each `times` over: row i is `x[index[i] // times]`. `inverse` undoes `index`."""

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


def _by_expert(arriving: list[list[int]], device: torch.device) -> torch.Tensor:
    """Where rows that came by (rank, expert), so many each, lie once they are to stand by (expert, rank)."""
    sizes = torch.tensor(arriving)
    starts = (sizes.flatten().cumsum(0).view_as(sizes) - sizes).T.flatten()
    sizes = sizes.T.flatten()
    rows = sum(map(sum, arriving))
    moved = torch.repeat_interleave(starts - (sizes.cumsum(0) - sizes), sizes, output_size=rows)
    return (torch.arange(rows) + moved).to(device)


class _AlsoMinimise(torch.autograd.Function):
    """`out` as it is; backward also minimises `loss`, times `scale`."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, loss: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = loss.new_tensor(scale)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grad, ctx.scale, None


def _mean(answers: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """(batch, seq, k, hidden) weighted by (batch, seq, k) -> (batch, seq, hidden)"""
    return (answers * gates.unsqueeze(-1)).sum(2)
