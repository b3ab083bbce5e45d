"""Context parallelism: causal attention over a sequence whose parts lie on several ranks.

A rank holds one part from each end of the sequence, parts i and 2 cp - 1 - i, so that causal work is even (2407.21783
section 3.3.2). Keys and values pass round a ring (2310.01889) or are gathered at once; either way a rank computes its
queries against one rank's keys at a time, by SDPA's own kernel, and joins the results by their log-sum-exp (online
softmax, 1805.02867).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from planner.facts.spec import ContextMethod
from workers.torch_private.attention import attend, attend_backward
from workers.trainer.compile import not_compiled
from workers.trainer.parallel.document_mask import Places, attend_within, attend_within_backward


@dataclass(frozen=True)
class ContextParallel:
    """What attention needs to know of cp. `group` is None when cp is 1, and then nothing is sent."""

    group: dist.ProcessGroup | None
    degree: int = 1
    index: int = 0
    method: ContextMethod = "ring"

    def own_part(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's positions of a tensor over the whole sequence: seq -> seq/cp along `dim`."""
        if self.group is None:
            return x
        parts = x.chunk(2 * self.degree, dim)
        return torch.cat((parts[self.index], parts[2 * self.degree - 1 - self.index]), dim)

    def positions(self, seq_len: int, device: torch.device) -> torch.Tensor:
        """Where this rank's `seq_len` positions lie in the whole sequence, (seq_len,)."""
        return self.own_part(torch.arange(seq_len * self.degree, device=device), 0)

    @not_compiled
    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Causal attention, (batch, heads, seq/cp, head size); keys and values may have fewer heads. Within each of the
        `documents` (batch, seq) where there are several."""
        return _Attention.apply(q, torch.stack((k, v)), self, documents)  # type: ignore[no-any-return]

    def places(self, owner: int, documents: torch.Tensor) -> Places:
        """Those of the tokens that rank `owner` has, of `documents` (batch, seq)."""
        one = replace(self, index=owner)
        positions = one.positions(documents.shape[1] // self.degree, documents.device)
        return Places(one.own_part(documents, 1), positions)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the parts of a sequence of something no gradient flows through."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x


class _Transport(Protocol):
    """Shows a rank the keys and values of every other, and takes their gradients home."""

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(rank whose they are, its keys and values), this rank's own first."""

    def give(self, owner: int, gradient: torch.Tensor) -> None:
        """This rank's part of the gradient of a block, in the order of `blocks`."""

    def home(self) -> torch.Tensor:
        """The sum over all ranks of the gradients of this rank's own block."""


class _Ring:
    """cp - 1 hops of the blocks, and as many of their gradients, which follow them round and end at home."""

    def __init__(self, own: torch.Tensor, cp: ContextParallel) -> None:
        assert cp.group is not None
        self._own, self._cp, self._group = own, cp, cp.group
        self._mine: torch.Tensor | None = None
        self._travelling: torch.Tensor | None = None

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        block = self._own
        for hop in range(self._cp.degree):
            last = hop == self._cp.degree - 1
            following, works = (block, []) if last else self._pass(block)
            yield (self._cp.index - hop) % self._cp.degree, block
            for work in works:
                work.wait()
            block = following

    def give(self, owner: int, gradient: torch.Tensor) -> None:
        if owner == self._cp.index:
            self._mine = gradient
            return
        # What arrived has this block's gradient from every rank before; the first hop has none.
        self._travelling = gradient if self._travelling is None else self._travelling + gradient
        arrived, works = self._pass(self._travelling)
        for work in works:
            work.wait()
        self._travelling = arrived

    def home(self) -> torch.Tensor:
        assert self._mine is not None
        assert self._travelling is not None
        return self._mine + self._travelling

    def _pass(self, x: torch.Tensor) -> tuple[torch.Tensor, list[dist.Work]]:
        """Send to the next rank, receive from the one before."""
        arriving, here = torch.empty_like(x), self._cp.index
        following, before = (dist.get_global_rank(self._group, (here + step) % self._cp.degree) for step in (1, -1))
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x.contiguous(), following, self._group),
                dist.P2POp(dist.irecv, arriving, before, self._group),
            ]
        )
        return arriving, works


class _Alone:
    """One rank, with all there is."""

    def __init__(self, own: torch.Tensor) -> None:
        self._own = own

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        yield 0, self._own

    def give(self, owner: int, gradient: torch.Tensor) -> None:
        self._own = gradient

    def home(self) -> torch.Tensor:
        return self._own


class _Gathered:
    """One all-gather of the blocks, one reduce-scatter of their gradients."""

    def __init__(self, own: torch.Tensor, cp: ContextParallel) -> None:
        assert cp.group is not None
        self._cp, self._group, self._own = cp, cp.group, own
        self._gradients: dict[int, torch.Tensor] = {}

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        every = self._own.new_empty((self._cp.degree, *self._own.shape))
        dist.all_gather_single(every.flatten(0, 1), self._own.contiguous(), group=self._group)
        for hop in range(self._cp.degree):
            owner = (self._cp.index - hop) % self._cp.degree
            yield owner, every[owner]

    def give(self, owner: int, gradient: torch.Tensor) -> None:
        self._gradients[owner] = gradient

    def home(self) -> torch.Tensor:
        every = torch.cat([self._gradients[owner] for owner in range(self._cp.degree)])
        mine = torch.empty_like(self._own)
        dist.reduce_scatter_single(mine, every, group=self._group)
        return mine


def _transport(own: torch.Tensor, cp: ContextParallel) -> _Transport:
    if cp.group is None:
        return _Alone(own)
    return _Ring(own, cp) if cp.method == "ring" else _Gathered(own, cp)


def _visible(owner: int, here: int, seq_len: int) -> tuple[slice, slice, bool]:
    """(queries, keys, whether causal) of this rank's queries against the block of `owner`.

    Both hold an early and a late part. Of an earlier owner's block all queries see the early part; of a later owner's
    the late queries see all.
    """
    half, whole = seq_len // 2, slice(None)
    if owner == here:
        return whole, whole, True
    return (whole, slice(half), False) if owner < here else (slice(half, None), whole, False)


class _Attention(torch.autograd.Function):
    """q (batch, heads, s, d), kv (2, batch, kv heads, s, d) -> (batch, heads, s, d), with s = seq/cp.

    Backward keeps what is passed in, the output and each query's log-sum-exp, and brings keys and values again rather
    than keep everybody's. Outputs are joined, and gradients of queries added up, in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, kv: torch.Tensor, cp: ContextParallel, documents: torch.Tensor | None
    ) -> torch.Tensor:
        out, total = q, q  # the first block is one's own, which all queries see
        for owner, block in _transport(kv, cp).blocks():
            queries, keys, causal = _visible(owner, cp.index, q.shape[2])
            k, v = block[..., keys, :]
            some_q = q[..., queries, :]
            if documents is None:
                part, here = attend(some_q, k, v, causal=causal)
            else:
                asking, asked = cp.places(cp.index, documents).part(queries), cp.places(owner, documents).part(keys)
                part, here = attend_within(some_q, k, v, asking, asked)
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
        transport = _transport(kv, cp)
        for owner, block in transport.blocks():
            queries, keys, causal = _visible(owner, cp.index, q.shape[2])
            some_grad, some_q, some_out = (x[..., queries, :] for x in (grad, q, out))
            k, v = block[..., keys, :]
            saved = some_grad, some_q, k, v, some_out, total[..., queries]
            if documents is None:
                found = attend_backward(*saved, causal=causal)
            else:
                asking, asked = cp.places(cp.index, documents).part(queries), cp.places(owner, documents).part(keys)
                found = attend_within_backward(*saved, asking, asked)
            q_grad[..., queries, :] += found.q
            block_grad = torch.zeros_like(block)
            block_grad[0][..., keys, :], block_grad[1][..., keys, :] = found.k, found.v
            transport.give(owner, block_grad)
        return q_grad.to(q.dtype), transport.home(), None, None
