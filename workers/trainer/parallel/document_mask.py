"""Attention within the documents of a packed sequence.

Every rank derives the documents from the tokens, so nothing is sent. Masked scores are finite. If a query sees no key
of a block, its log-sum-exp is so small that the block has no weight in the merge. With minus infinity, the kernels
would return 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from workers.torch_private.attention import AttentionGradients, attend, attend_backward

MASKED_SCORE = -1e30


class TokenPositions(NamedTuple):
    """Store the document of each token, (batch, n), and its position in the sequence, (n,)."""

    documents: torch.Tensor
    positions: torch.Tensor

    def part(self, chosen: slice) -> TokenPositions:
        return TokenPositions(self.documents[:, chosen], self.positions[chosen])


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
    rows = [
        attend(q[i : i + 1], k[i : i + 1], v[i : i + 1], causal=False, bias=_make_bias(q, i, queries, keys))
        for i in range(q.shape[0])
    ]
    return _concatenate([row[0] for row in rows]), _concatenate([row[1] for row in rows])


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
