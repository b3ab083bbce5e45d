"""Grouped experts and routers match a computation token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from planner.facts.parse_spec import parse_fields
from planner.facts.spec import ModelSpec
from workers.dry_run import run_dry_step
from workers.trainer.model import moe
from workers.trainer.model.layers import Strategy
from workers.trainer.model.moe import MixtureOfExperts, _inverse, _order_by_expert, _Take, grouped_product
from workers.trainer.parallel.tensor_parallel import ParallelInput


@pytest.mark.parametrize(("out_size", "in_size"), [(8, 16), (6, 10)], ids=["kernel", "one by one"])
@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 0], [9, 0, 0, 0]])
def test_multiplies_each_run_of_rows_with_its_matrix(counts: list[int], out_size: int, in_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts), in_size, generator=generator, requires_grad=True)
    matrices = torch.randn(4, out_size, in_size, generator=generator, requires_grad=True)
    grad = torch.randn(sum(counts), out_size, generator=generator)
    expected = torch.cat([run @ matrix.T for run, matrix in zip(rows.split(counts), matrices, strict=True)])
    wanted = torch.autograd.grad(expected, (rows, matrices), grad)

    out = grouped_product(rows, matrices, counts)

    torch.testing.assert_close(out, expected)
    for gradient, other in zip(torch.autograd.grad(out, (rows, matrices), grad), wanted, strict=True):
        torch.testing.assert_close(gradient, other)


def test_an_expert_without_tokens_has_a_zero_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some GPUs leave uninitialized memory in empty runs."""
    product = moe.F.grouped_mm

    def leaves(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        made = product(left, right, offs=offs)
        made[offs.diff(prepend=offs.new_zeros(1)) == 0] = 7.0
        return made

    monkeypatch.setattr(moe.F, "grouped_mm", leaves)
    found = moe.grouped_outer(torch.ones(4, 8), torch.ones(4, 16), [3, 0, 1, 0])
    assert found.amax((1, 2)).tolist() == [3.0, 0.0, 1.0, 0.0]


def test_reorders_rows_by_expert_and_back() -> None:
    arriving = [[2, 0, 1], [1, 3, 0]]  # of each rank, for each expert
    rows = torch.tensor([[0.0], [0.1], [2.0], [0.5], [1.0], [1.1], [1.2]], requires_grad=True)
    order = _order_by_expert(arriving, torch.device("cpu"))
    back = _inverse(order)
    sorted_rows = _Take.apply(rows, order, back, 1)
    assert sorted_rows.flatten().tolist() == pytest.approx([0.0, 0.1, 0.5, 1.0, 1.1, 1.2, 2.0])
    assert torch.equal(_Take.apply(sorted_rows, back, order, 1), rows)


def test_the_gradient_of_a_token_is_the_sum_over_its_copies() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    order = torch.tensor([5, 0, 3, 1, 4, 2])
    taken = _Take.apply(x, order, _inverse(order), 2)
    assert torch.equal(taken, x[order // 2])
    grad = torch.randn(6, 2)
    expected = torch.zeros(3, 2).index_add(0, order // 2, grad)
    torch.testing.assert_close(torch.autograd.grad(taken, x, grad)[0], expected)


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def step(experts: int, inner: int) -> tuple[int, int]:
    """Return (operations, FLOPs) of a dry step with two experts per token."""
    moe = {"num_experts": experts, "experts_per_token": 2, "expert_ffn_hidden_size": inner, "balance_loss": 0.0}
    model = {"preset": "mixtral-tiny", "moe": moe, "num_layers": 2}
    spec = parse_fields({"model": model, "train": {"global_batch": 2, "seq_len": 64}})
    with Calls() as calls:
        flops = run_dry_step(spec, 0).flops
    return calls.count, flops


def test_the_number_of_operations_does_not_depend_on_the_number_of_experts() -> None:
    (few, few_flops), (many, many_flops), (_, wide_flops) = step(4, 32), step(64, 32), step(4, 64)
    tokens, h, layers, passes = 2 * 64, 128, 2, 3
    assert many == few
    assert many_flops - few_flops == passes * 2 * tokens * h * (64 - 4) * layers  # routers
    assert wide_flops - few_flops == passes * 2 * (2 * tokens) * 3 * h * (64 - 32) * layers


def mixture(scale: float = 0.0, **moe: Any) -> MixtureOfExperts:
    sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "num_kv_heads": 2, "ffn_hidden_size": 16}
    more = {"arch": "llama", "vocab_size": 256, "max_seq_len": 16, "tied_embeddings": False}
    experts = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 12, "balance_loss": 0.0, **moe}
    model = ModelSpec.model_validate({**sizes, **more, "moe": experts})
    assert model.moe is not None
    made = MixtureOfExperts(model, model.moe, Strategy(balance_scale=scale))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    return made


def states(batch: int = 2, seq_len: int = 6) -> torch.Tensor:
    return torch.randn(batch, seq_len, 8, generator=torch.Generator().manual_seed(1))


def answer(made: MixtureOfExperts, expert: int, token: torch.Tensor) -> torch.Tensor:
    gate, up, down = (part.weight[expert] for part in (made.experts.gate, made.experts.up, made.experts.down))
    return (F.silu(token @ gate.T) * (token @ up.T)) @ down.T


def by_hand(made: MixtureOfExperts, x: torch.Tensor, capacity: int | None) -> torch.Tensor:
    """Compute the mixture token by token, with a capacity per sequence."""
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
def test_each_token_uses_its_best_experts(
    experts_per_token: int, factor: float | None, capacity: dict[int, int] | None
) -> None:
    made, x = mixture(experts_per_token=experts_per_token, capacity_factor=factor), states()
    room = None if capacity is None else capacity[experts_per_token]
    torch.testing.assert_close(made(ParallelInput(x, x)), by_hand(made, x, room), rtol=1e-4, atol=1e-5)
    if room is not None and experts_per_token < 4:
        assert not torch.allclose(made(ParallelInput(x, x)), by_hand(made, x, None), atol=1e-4), "nothing was dropped"


def test_the_shared_expert_processes_every_token() -> None:
    made, x = mixture(shared_experts=1), states()
    assert made.shared is not None
    torch.testing.assert_close(
        made(ParallelInput(x, x)), by_hand(made, x, None) + made.shared.forward_within_tp(x), rtol=1e-4, atol=1e-5
    )


def test_backward_also_minimizes_the_balance_loss() -> None:
    made, x = mixture(scale=0.25, balance_loss=0.01), states()
    (made(ParallelInput(x, x)) * 0).sum().backward()
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
    even = made._compute_balance_loss(made.router(x))
    assert float(even) == pytest.approx(2.0), "1 a sequence when every expert is as probable"
