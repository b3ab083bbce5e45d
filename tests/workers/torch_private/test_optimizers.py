"""AdamW without the compiler matches AdamW of torch."""

from __future__ import annotations

import torch

from workers.torch_private.compiler import AdamW


def test_adamw_matches_torch() -> None:
    ours, theirs = ([torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4)) for _ in range(2)] for _ in range(2))
    made = [
        kind(own, lr=0.1, weight_decay=0.2, fused=True) for kind, own in ((AdamW, ours), (torch.optim.AdamW, theirs))
    ]
    for step in range(3):
        for optimizer, own in zip(made, (ours, theirs), strict=True):
            for parameter in own:
                parameter.grad = torch.full_like(parameter, 0.5 - step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert all(parameter.grad is None and not parameter.grad_fn for parameter in ours)
    kept, expected = (optimizer.state_dict() for optimizer in made)
    assert str(kept) == str(expected)
    made[0].load_state_dict(expected)
    assert str(made[0].state_dict()) == str(expected)
