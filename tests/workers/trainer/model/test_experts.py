"""A mixture does what its definition says, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from planner.facts.spec import ModelSpec
from workers.trainer.model.experts import Mixture
from workers.trainer.model.layers import Strategy
from workers.trainer.parallel.tensor_parallel import Entered


def mixture(scale: float = 0.0, **moe: Any) -> Mixture:
    sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "num_kv_heads": 2, "ffn_hidden_size": 16}
    more = {"arch": "llama", "vocab_size": 256, "max_seq_len": 16, "tied_embeddings": False}
    experts = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 12, "balance_loss": 0.0, **moe}
    model = ModelSpec.model_validate({**sizes, **more, "moe": experts})
    assert model.moe is not None
    made = Mixture(model, model.moe, Strategy(balance_scale=scale))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    return made


def states(batch: int = 2, seq_len: int = 6) -> torch.Tensor:
    return torch.randn(batch, seq_len, 8, generator=torch.Generator().manual_seed(1))


def answer(made: Mixture, expert: int, token: torch.Tensor) -> torch.Tensor:
    gate, up, down = (part.weight[expert] for part in (made.experts.gate, made.experts.up, made.experts.down))
    return (F.silu(token @ gate.T) * (token @ up.T)) @ down.T


def by_hand(made: Mixture, x: torch.Tensor, capacity: int | None) -> torch.Tensor:
    """Token after token: each of its best experts answers, as long as it has room left in the sequence."""
    out = torch.zeros_like(x)
    for b in range(x.shape[0]):
        taken = [0] * made.spec.num_experts
        for s in range(x.shape[1]):
            probabilities = (x[b, s] @ made.router.weight.T).softmax(-1)
            best = probabilities.argsort(descending=True)[: made.spec.experts_per_token].tolist()
            whole = sum(float(probabilities[e].detach()) for e in best) if len(best) > 1 else 1.0
            for e in best:
                taken[e] += 1
                if capacity is None or taken[e] <= capacity:
                    out[b, s] += answer(made, e, x[b, s]) * probabilities[e] / whole
    return out


@pytest.mark.parametrize("experts_per_token", [1, 2, 4])
@pytest.mark.parametrize(("factor", "capacity"), [(None, None), (1.0, {1: 2, 2: 3, 4: 6})])
def test_each_token_is_answered_by_its_best_experts(
    experts_per_token: int, factor: float | None, capacity: dict[int, int] | None
) -> None:
    made, x = mixture(experts_per_token=experts_per_token, capacity_factor=factor), states()
    room = None if capacity is None else capacity[experts_per_token]
    torch.testing.assert_close(made(Entered(x, x)), by_hand(made, x, room), rtol=1e-4, atol=1e-5)
    if room is not None and experts_per_token < 4:
        assert not torch.allclose(made(Entered(x, x)), by_hand(made, x, None), atol=1e-4), "nothing was dropped"


def test_the_shared_expert_answers_every_token() -> None:
    made, x = mixture(shared_experts=1), states()
    assert made.shared is not None
    torch.testing.assert_close(
        made(Entered(x, x)), by_hand(made, x, None) + made.shared.within(x), rtol=1e-4, atol=1e-5
    )


def test_backward_also_minimises_how_unevenly_a_sequence_loads_the_experts() -> None:
    made, x = mixture(scale=0.25, balance_loss=0.01), states()
    (made(Entered(x, x)) * 0).sum().backward()
    found = made.router.weight.grad
    assert found is not None

    router = made.router.weight.detach().clone().requires_grad_()
    probabilities = (x @ router.T).softmax(-1)
    chosen = F.one_hot(probabilities.topk(2, dim=-1).indices, 4).sum(2).float()
    # 2412.19437 equations 17 to 20: E / (k T) tokens of each expert, times its mean probability.
    loss = ((4 / (2 * 6)) * chosen.sum(1) * probabilities.mean(1)).sum()
    (0.25 * loss).backward()
    torch.testing.assert_close(found, router.grad)
    with torch.no_grad():
        made.router.weight.zero_()
    even = made._imbalance(made.router(x))
    assert float(even) == pytest.approx(2.0), "1 a sequence when every expert is as probable"
