"""Expert parallelism: send rows of hidden states to the ranks of their experts (2006.16668, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

Counts = list[int]


@dataclass
class ReceivedRows:
    """Count the rows that this rank's experts received since `clear`."""

    rows: int = 0

    def clear(self) -> int:
        rows, self.rows = self.rows, 0
        return rows


class ExchangePlan(NamedTuple):
    """Store the rows of an exchange: `sent` to each rank, `arriving` from each rank for each local expert."""

    sent: Counts
    arriving: list[Counts]

    @property
    def received(self) -> Counts:
        """Return the rows from each rank."""
        return [sum(counts) for counts in self.arriving]


@dataclass(frozen=True)
class ExpertParallel:
    """Configure expert parallelism. `group` is None if ep is 1.

    Rank i of the group has the i-th block of experts. `received` counts the routed rows.
    """

    group: dist.ProcessGroup | None
    degree: int = 1
    index: int = 0
    received: ReceivedRows = field(default_factory=ReceivedRows)

    def plan(self, counts: torch.Tensor, rows: int) -> ExchangePlan:
        """Exchange the number of rows per expert, (experts,) int64, and return the plan of the exchange."""
        arriving = self._exchange_counts(counts)
        arriving_counts = arriving.tolist()
        self.received.rows += sum(map(sum, arriving_counts))
        return ExchangePlan(counts.unflatten(0, (self.degree, -1)).sum(1).tolist(), arriving_counts)

    def _exchange_counts(self, counts: torch.Tensor) -> torch.Tensor:
        """Return the rows from each rank for each local expert, (ep, experts/ep)."""
        if self.group is None:
            return counts.unsqueeze(0)
        received_counts = torch.empty_like(counts)
        dist.all_to_all_single(received_counts, counts, group=self.group)
        by_rank: torch.Tensor = received_counts.unflatten(0, (self.degree, -1))
        return by_rank

    def exchange(self, rows: torch.Tensor, sent: Counts, received: Counts) -> torch.Tensor:
        """Exchange rows: (sum(sent), hidden) by rank -> (sum(received), hidden) by rank."""
        if self.group is None:
            return rows
        return _Exchange.apply(rows, sent, received, self.group)  # type: ignore[no-any-return]


class _Exchange(torch.autograd.Function):
    """All-to-all whose backward is the reverse all-to-all."""

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
    """Distribute rows evenly over experts, for a dry run without routing."""

    def plan(self, counts: torch.Tensor, rows: int) -> ExchangePlan:
        self._exchange_counts(counts)
        share, rest = divmod(rows, len(counts))
        by_expert = [share + (expert < rest) for expert in range(len(counts))]
        local = len(counts) // self.degree
        by_rank = [by_expert[i : i + local] for i in range(0, len(counts), local)]
        self.received.rows += self.degree * sum(by_rank[self.index])
        return ExchangePlan([sum(run) for run in by_rank], [by_rank[self.index]] * self.degree)
