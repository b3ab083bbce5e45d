"""Expert parallelism: rows of hidden states to the ranks that hold their experts, and back (2006.16668 section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

Counts = list[int]


@dataclass
class Received:
    """Rows that came to this rank's experts since `clear`, as the ways back and their gradients hand them over."""

    rows: int = 0

    def clear(self) -> int:
        rows, self.rows = self.rows, 0
        return rows


class Plan(NamedTuple):
    """Rows of one exchange: `sent` to each rank, and `arriving` from each rank for each of this rank's experts."""

    sent: Counts
    arriving: list[Counts]

    @property
    def received(self) -> Counts:
        """From each rank."""
        return [sum(counts) for counts in self.arriving]


@dataclass(frozen=True)
class ExpertParallel:
    """What a mixture needs to know of ep. `group` is None when ep is 1, and then nothing is sent.

    Rank i of the group holds the i-th run of experts. `received` counts what only the router knows.
    """

    group: dist.ProcessGroup | None
    degree: int = 1
    index: int = 0
    received: Received = field(default_factory=Received)

    def plan(self, counts: torch.Tensor, rows: int) -> Plan:
        """Tell the group how many of `rows` go to each expert, (experts,) int64, and hear how many come here."""
        arriving = self._exchange_counts(counts)
        here = arriving.tolist()
        self.received.rows += sum(map(sum, here))
        return Plan(counts.unflatten(0, (self.degree, -1)).sum(1).tolist(), here)

    def _exchange_counts(self, counts: torch.Tensor) -> torch.Tensor:
        """(experts,) -> rows from each rank for each of one's own, (ep, experts/ep)"""
        if self.group is None:
            return counts.unsqueeze(0)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        by_rank: torch.Tensor = theirs.unflatten(0, (self.degree, -1))
        return by_rank

    def exchange(self, rows: torch.Tensor, sent: Counts, received: Counts) -> torch.Tensor:
        """(sum(sent), hidden) by rank of the group -> (sum(received), hidden) by rank."""
        if self.group is None:
            return rows
        return _Exchange.apply(rows, sent, received, self.group)  # type: ignore[no-any-return]


class _Exchange(torch.autograd.Function):
    """An all-to-all; its gradient is the one back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: Counts, received: Counts, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _all_to_all(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(rows: torch.Tensor, sent: Counts, received: Counts, group: dist.ProcessGroup) -> torch.Tensor:
    out = rows.new_empty((sum(received), rows.shape[-1]))
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


class EvenExpertParallel(ExpertParallel):
    """For a dry run, which routes nothing: each expert gets as many rows as the next, from every rank."""

    def plan(self, counts: torch.Tensor, rows: int) -> Plan:
        self._exchange_counts(counts)
        share, rest = divmod(rows, len(counts))
        by_expert = [share + (expert < rest) for expert in range(len(counts))]
        local = len(counts) // self.degree
        by_rank = [by_expert[i : i + local] for i in range(0, len(counts), local)]
        self.received.rows += self.degree * sum(by_rank[self.index])
        return Plan([sum(run) for run in by_rank], [by_rank[self.index]] * self.degree)
