"""Documents of a packed sequence: a query sees keys of its own document alone.

Which document a token lies in follows from the tokens, and every rank has those: nothing is sent. Keys that are not
seen get so large a score that none is larger, and a finite one: of a block whose keys a query sees none of, the kernels
give a log-sum-exp that weighs nothing where blocks are joined (of minus infinity they would give 0).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from workers.torch_private.attention import Gradients, attend, attend_backward

HIDDEN = -1e30


class Places(NamedTuple):
    """Of some tokens: which document each lies in, (batch, n), and where in the sequence they are, (n,)."""

    documents: torch.Tensor
    positions: torch.Tensor

    def part(self, chosen: slice) -> Places:
        return Places(self.documents[:, chosen], self.positions[chosen])


def documents_of(tokens: torch.Tensor, end: int | None) -> torch.Tensor | None:
    """Which document of its sequence each token lies in, (batch, seq); `end` belongs to the one it ends. None: all of
    a sequence is one."""
    if end is None:
        return None
    ends = tokens == end
    return ends.cumsum(1) - ends.long()


def hidden(queries: Places, keys: Places) -> torch.Tensor:
    """(batch, 1, queries, keys), whether a key is later or in another document."""
    found = queries.documents[:, :, None] != keys.documents[:, None, :]
    found |= queries.positions[:, None] < keys.positions[None, :]
    return found.unsqueeze(1)


def attend_within(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, queries: Places, keys: Places
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `attend`, a sequence at a time: no two have the same documents."""
    rows = [
        attend(q[i : i + 1], k[i : i + 1], v[i : i + 1], causal=False, bias=_bias(q, i, queries, keys))
        for i in range(q.shape[0])
    ]
    return _joined([row[0] for row in rows]), _joined([row[1] for row in rows])


def attend_within_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    queries: Places,
    keys: Places,
) -> Gradients:
    """As `attend_backward`."""
    rows = []
    for i in range(q.shape[0]):
        some = (x[i : i + 1] for x in (grad, q, k, v, out, lse))
        rows.append(attend_backward(*some, causal=False, bias=_bias(q, i, queries, keys)))
    return Gradients(*(_joined(list(parts)) for parts in zip(*rows, strict=True)))


def _bias(q: torch.Tensor, row: int, queries: Places, keys: Places) -> torch.Tensor:
    """What is added to the scores of one sequence, (1, 1, queries, keys)"""
    not_seen = hidden(*(places._replace(documents=places.documents[row : row + 1]) for places in (queries, keys)))
    return torch.zeros(not_seen.shape, dtype=q.dtype, device=q.device).masked_fill_(not_seen, HIDDEN)


def _joined(rows: list[torch.Tensor]) -> torch.Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(rows)
