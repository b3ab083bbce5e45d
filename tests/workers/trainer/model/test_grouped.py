"""Experts computed together answer as each alone, whatever came to them, and a dry run counts their products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from planner.facts.reading.parse import parse_fields
from workers.dry_run.rank import dry_step
from workers.trainer.model import grouped
from workers.trainer.model.experts import _by_expert, _inverse, _Take
from workers.trainer.model.grouped import grouped_product


@pytest.mark.parametrize(("out_size", "in_size"), [(8, 16), (6, 10)], ids=["kernel", "one by one"])
@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 0], [9, 0, 0, 0]])
def test_runs_of_rows_are_multiplied_each_with_its_matrix(counts: list[int], out_size: int, in_size: int) -> None:
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


def test_an_expert_without_tokens_has_no_gradient_whatever_the_kernel_leaves_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On some GPUs it leaves what was in memory."""
    product = grouped.F.grouped_mm

    def leaves(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        made = product(left, right, offs=offs)
        made[offs.diff(prepend=offs.new_zeros(1)) == 0] = 7.0
        return made

    monkeypatch.setattr(grouped.F, "grouped_mm", leaves)
    found = grouped.grouped_outer(torch.ones(4, 8), torch.ones(4, 16), [3, 0, 1, 0])
    assert found.amax((1, 2)).tolist() == [3.0, 0.0, 1.0, 0.0]


def test_rows_by_rank_become_rows_by_expert_and_go_back() -> None:
    arriving = [[2, 0, 1], [1, 3, 0]]  # of each rank, for each expert
    rows = torch.tensor([[0.0], [0.1], [2.0], [0.5], [1.0], [1.1], [1.2]], requires_grad=True)
    order = _by_expert(arriving, torch.device("cpu"))
    back = _inverse(order)
    sorted_rows = _Take.apply(rows, order, back, 1)
    assert sorted_rows.flatten().tolist() == pytest.approx([0.0, 0.1, 0.5, 1.0, 1.1, 1.2, 2.0])
    assert torch.equal(_Take.apply(sorted_rows, back, order, 1), rows)


def test_a_token_s_gradient_is_the_sum_of_its_copies() -> None:
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
    """(operations, FLOPs) of a dry step: each token goes to two experts, however many there are."""
    moe = {"num_experts": experts, "experts_per_token": 2, "expert_ffn_hidden_size": inner, "balance_loss": 0.0}
    model = {"preset": "mixtral-tiny", "moe": moe, "num_layers": 2}
    spec = parse_fields({"model": model, "train": {"global_batch": 2, "seq_len": 64}})
    with Calls() as calls:
        flops = dry_step(spec, 0).flops
    return calls.count, flops


def test_more_experts_are_no_more_operations_and_their_products_are_counted() -> None:
    (few, few_flops), (many, many_flops), (_, wide_flops) = step(4, 32), step(64, 32), step(4, 64)
    tokens, h, layers, passes = 2 * 64, 128, 2, 3
    assert many == few
    assert many_flops - few_flops == passes * 2 * tokens * h * (64 - 4) * layers  # routers
    assert wide_flops - few_flops == passes * 2 * (2 * tokens) * 3 * h * (64 - 32) * layers
