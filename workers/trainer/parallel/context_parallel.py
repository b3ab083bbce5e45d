"""Context parallelism, and attention within the documents of a packed sequence.

A rank holds chunks i and 2 cp - 1 - i of the sequence, so that causal work is balanced (2407.21783, section 3.3.2).
Keys and values travel through a ring (2310.01889), or are gathered at once. A rank computes its queries against the
keys of one rank at a time, and merges the outputs by their log-sum-exp (online softmax, 1805.02867).

Every rank derives the documents from the tokens, so nothing is sent. Masked scores are finite. If a query sees no key
of a block, its log-sum-exp is so small that the block has no weight in the merge. With minus infinity, the kernels
would return 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from planner.facts.spec import ContextMethod
from workers.torch_private.kernels import AttentionGradients, attend, attend_backward
from workers.trainer.compile import exclude_from_compile

MASKED_SCORE = -1e30


@dataclass(frozen=True)
class ContextParallel:
    """Configure context parallelism. `group` is None if cp is 1."""

    group: dist.ProcessGroup | None
    degree: int = 1
    index: int = 0
    method: ContextMethod = "ring"

    def own_part(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's positions of a tensor over the whole sequence: seq -> seq/cp along `dim`."""
        if self.group is None:
            return x
        parts = x.chunk(2 * self.degree, dim)
        return torch.cat((parts[self.index], parts[2 * self.degree - 1 - self.index]), dim)

    def positions(self, seq_len: int, device: torch.device) -> torch.Tensor:
        """Return the positions of this rank's `seq_len` tokens in the whole sequence, (seq_len,)."""
        return self.own_part(torch.arange(seq_len * self.degree, device=device), 0)

    @exclude_from_compile
    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute causal attention, (batch, heads, seq/cp, head size).

        Keys and values can have fewer heads. Attention stays within each document of `documents` (batch, seq).
        """
        return _Attention.apply(q, torch.stack((k, v)), self, documents)  # type: ignore[no-any-return]

    def get_positions(self, owner: int, documents: torch.Tensor, chosen: slice) -> TokenPositions:
        """Return the positions and documents of chosen tokens of rank `owner`."""
        one = replace(self, index=owner)
        positions = one.positions(documents.shape[1] // self.degree, documents.device)
        return TokenPositions(one.own_part(documents, 1)[:, chosen], positions[chosen])

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum a tensor without gradient over the parts of the sequence."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x


class _Transport(Protocol):
    """Bring keys and values of all ranks to this rank, and return their gradients."""

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (owner rank, keys and values), this rank's own block first."""

    def add_gradient(self, owner: int, gradient: torch.Tensor) -> None:
        """Add this rank's gradient of a block, in the order of `blocks`."""

    def collect_own_gradient(self) -> torch.Tensor:
        """Return the gradient of this rank's own block, summed over all ranks."""


class _Ring:
    """Pass blocks through the ring in cp - 1 hops. Their gradients follow, and end at the owner."""

    def __init__(self, own: torch.Tensor, cp: ContextParallel) -> None:
        assert cp.group is not None
        self._own, self._cp, self._group = own, cp, cp.group
        self._own_gradient: torch.Tensor | None = None
        self._in_flight: torch.Tensor | None = None

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        block = self._own
        for hop in range(self._cp.degree):
            last = hop == self._cp.degree - 1
            following, works = (block, []) if last else self._pass(block)
            yield (self._cp.index - hop) % self._cp.degree, block
            for work in works:
                work.wait()
            block = following

    def add_gradient(self, owner: int, gradient: torch.Tensor) -> None:
        if owner == self._cp.index:
            self._own_gradient = gradient
            return
        # What arrived is the sum of this block's gradients from the ranks before. The first hop has none.
        self._in_flight = gradient if self._in_flight is None else self._in_flight + gradient
        arrived, works = self._pass(self._in_flight)
        for work in works:
            work.wait()
        self._in_flight = arrived

    def collect_own_gradient(self) -> torch.Tensor:
        assert self._own_gradient is not None
        assert self._in_flight is not None
        return self._own_gradient + self._in_flight

    def _pass(self, x: torch.Tensor) -> tuple[torch.Tensor, list[dist.Work]]:
        """Send a tensor to the next rank, and receive from the previous rank."""
        arriving, here = torch.empty_like(x), self._cp.index
        following, before = (dist.get_global_rank(self._group, (here + step) % self._cp.degree) for step in (1, -1))
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x.contiguous(), following, self._group),
                dist.P2POp(dist.irecv, arriving, before, self._group),
            ]
        )
        return arriving, works


class _SingleRank:
    """Transport for one rank, without communication."""

    def __init__(self, own: torch.Tensor) -> None:
        self._own = own

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        yield 0, self._own

    def add_gradient(self, owner: int, gradient: torch.Tensor) -> None:
        self._own = gradient

    def collect_own_gradient(self) -> torch.Tensor:
        return self._own


class _Gathered:
    """Gather the blocks with one all-gather, and reduce-scatter their gradients."""

    def __init__(self, own: torch.Tensor, cp: ContextParallel) -> None:
        assert cp.group is not None
        self._cp, self._group, self._own = cp, cp.group, own
        self._gradients: dict[int, torch.Tensor] = {}

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        gathered = self._own.new_empty((self._cp.degree, *self._own.shape))
        dist.all_gather_single(gathered.flatten(0, 1), self._own.contiguous(), group=self._group)
        for hop in range(self._cp.degree):
            owner = (self._cp.index - hop) % self._cp.degree
            yield owner, gathered[owner]

    def add_gradient(self, owner: int, gradient: torch.Tensor) -> None:
        self._gradients[owner] = gradient

    def collect_own_gradient(self) -> torch.Tensor:
        gathered = torch.cat([self._gradients[owner] for owner in range(self._cp.degree)])
        mine = torch.empty_like(self._own)
        dist.reduce_scatter_single(mine, gathered, group=self._group)
        return mine


def _make_transport(own: torch.Tensor, cp: ContextParallel) -> _Transport:
    if cp.group is None:
        return _SingleRank(own)
    return _Ring(own, cp) if cp.method == "ring" else _Gathered(own, cp)


def _get_visible(owner: int, here: int, seq_len: int) -> tuple[slice, slice, bool]:
    """Return (queries, keys, causal) for this rank's queries against the block of `owner`.

    Each rank has an early and a late chunk. All queries see the early chunk of an earlier owner. Late queries see the
    whole block of a later owner.
    """
    half, whole = seq_len // 2, slice(None)
    if owner == here:
        return whole, whole, True
    return (whole, slice(half), False) if owner < here else (slice(half, None), whole, False)


class _Attention(torch.autograd.Function):
    """Attend over all blocks: q (batch, heads, s, d), kv (2, batch, kv heads, s, d), s = seq/cp.

    Backward keeps the inputs, the output, and the log-sum-exp of each query, and transports keys and values again.
    Outputs and query gradients accumulate in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, kv: torch.Tensor, cp: ContextParallel, documents: torch.Tensor | None
    ) -> torch.Tensor:
        out, total = q, q  # The first block is this rank's own block.
        for owner, block in _make_transport(kv, cp).blocks():
            queries, keys, causal = _get_visible(owner, cp.index, q.shape[2])
            k, v = block[..., keys, :]
            some_q = q[..., queries, :]
            if documents is None:
                part, here = attend(some_q, k, v, causal=causal)
            else:
                own, others = cp.get_positions(cp.index, documents, queries), cp.get_positions(owner, documents, keys)
                part, here = attend_in_documents(some_q, k, v, own, others)
            if owner == cp.index:
                out, total = part.float(), here
                continue
            some, before = out[..., queries, :], total[..., queries]
            some.lerp_(part.float(), (here - before).sigmoid_().unsqueeze(-1))
            before.copy_(torch.logaddexp(before, here))
        result = out.to(q.dtype)
        ctx.save_for_backward(q, kv, result, total)
        ctx.cp, ctx.documents = cp, documents
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        q, kv, out, total = ctx.saved_tensors
        cp: ContextParallel = ctx.cp
        documents: torch.Tensor | None = ctx.documents
        grad = grad.contiguous()
        q_grad = torch.zeros_like(q, dtype=torch.float32)
        transport = _make_transport(kv, cp)
        for owner, block in transport.blocks():
            queries, keys, causal = _get_visible(owner, cp.index, q.shape[2])
            some_grad, some_q, some_out = (x[..., queries, :] for x in (grad, q, out))
            k, v = block[..., keys, :]
            saved = some_grad, some_q, k, v, some_out, total[..., queries]
            if documents is None:
                grads = attend_backward(*saved, causal=causal)
            else:
                own, others = cp.get_positions(cp.index, documents, queries), cp.get_positions(owner, documents, keys)
                grads = attend_in_documents_backward(*saved, own, others)
            q_grad[..., queries, :] += grads.q
            block_grad = torch.zeros_like(block)
            block_grad[0][..., keys, :], block_grad[1][..., keys, :] = grads.k, grads.v
            transport.add_gradient(owner, block_grad)
        return q_grad.to(q.dtype), transport.collect_own_gradient(), None, None


class TokenPositions(NamedTuple):
    """Store the document of each token, (batch, n), and its position in the sequence, (n,)."""

    documents: torch.Tensor
    positions: torch.Tensor


def get_document_ids(tokens: torch.Tensor, end: int | None) -> torch.Tensor | None:
    """Return the document index of each token, (batch, seq), or None for one document per sequence.

    The `end` token belongs to the document that it ends.
    """
    if end is None:
        return None
    ends = tokens == end
    return ends.cumsum(1) - ends.long()


def get_hidden_mask(queries: TokenPositions, keys: TokenPositions) -> torch.Tensor:
    """Return which keys are later or in another document, (batch, 1, queries, keys)."""
    found = queries.documents[:, :, None] != keys.documents[:, None, :]
    found |= queries.positions[:, None] < keys.positions[None, :]
    return found.unsqueeze(1)


def attend_in_documents(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, queries: TokenPositions, keys: TokenPositions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `attend` one sequence at a time, because documents differ between sequences."""
    rows = []
    for i in range(q.shape[0]):
        some = (x[i : i + 1] for x in (q, k, v))
        rows.append(attend(*some, causal=False, bias=_make_bias(q, i, queries, keys)))
    out, lse = (_concatenate(list(parts)) for parts in zip(*rows, strict=True))
    return out, lse


def attend_in_documents_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    queries: TokenPositions,
    keys: TokenPositions,
) -> AttentionGradients:
    """Compute `attend_backward` one sequence at a time."""
    rows = []
    for i in range(q.shape[0]):
        some = (x[i : i + 1] for x in (grad, q, k, v, out, lse))
        rows.append(attend_backward(*some, causal=False, bias=_make_bias(q, i, queries, keys)))
    return AttentionGradients(*(_concatenate(list(parts)) for parts in zip(*rows, strict=True)))


def _make_bias(q: torch.Tensor, row: int, queries: TokenPositions, keys: TokenPositions) -> torch.Tensor:
    """Return the additive mask of one sequence, (1, 1, queries, keys)."""
    mask = get_hidden_mask(
        *(positions._replace(documents=positions.documents[row : row + 1]) for positions in (queries, keys))
    )
    return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(mask, MASKED_SCORE)


def _concatenate(rows: list[torch.Tensor]) -> torch.Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(rows)
