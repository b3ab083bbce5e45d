"""Products in fp8: what the scaled kernel of torch gives, one power of two a tensor, and a GPU that has none."""

from __future__ import annotations

import json

import pytest
import torch

from planner.facts.parse_spec import parse_spec
from planner.facts.spec_rules import find_unsupported_fields
from tests.parity.cases import SIZES
from workers.trainer import __main__ as trainer
from workers.trainer.errors import UserError
from workers.trainer.parallel.matmul import WIDE, Fp8, Linears

TOKENS, IN, OUT = 32, 64, 48
FP8_ROUNDING = 0.08  # of a sum of products whose terms are each rounded to 3 bits, or 2


def drawn(rows: int, columns: int, size: float, kind: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns)) * size).to(kind)


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_all_three_products_are_those_of_wide_ones_to_the_rounding_of_fp8(kind: torch.dtype) -> None:
    weights = [drawn(OUT, IN, 0.02, kind), drawn(OUT + 16, IN, 0.02, kind)]
    x, grads = drawn(TOKENS, IN, 3.0, kind), [drawn(TOKENS, len(w), 1e-6, kind) for w in weights]
    biases = [None, drawn(1, OUT + 16, 1.0, kind).flatten()]
    found, wanted = [], []
    for products, into in ((Fp8(), found), (WIDE, wanted)):
        rows = [products.gradient(grad) for grad in grads]
        into += products.outputs(x.unflatten(0, (2, -1)), weights, biases)
        into += [products.input_gradient(rows, weights), *products.weight_gradients(rows, x)]
    for one, other in zip(found, wanted, strict=True):
        assert (one.shape, one.dtype) == (other.shape, kind)
        assert 0.001 < apart(one, other) < FP8_ROUNDING


def test_an_element_is_rounded_alike_whatever_else_its_tensor_holds() -> None:
    x, weight = drawn(TOKENS, IN, 1.0, torch.float32), drawn(OUT, IN, 0.02, torch.float32)
    x += x.sign() * 0.5  # the smallest have fewer bits
    louder = torch.cat((x, torch.full((16, IN), 77.0)))  # as another rank's part may be
    (alone,), (beside,) = (Fp8().outputs(rows, [weight], [None]) for rows in (x, louder))
    assert torch.equal(alone, beside[:TOKENS])


def test_gradients_have_the_wider_range() -> None:
    """Five bits of exponent: 2^22 apart is beyond E4M3, where the smaller would be nothing."""
    rows = torch.ones(TOKENS, OUT) * torch.tensor([1.0, 2.0**-22]).repeat(TOKENS // 2).unsqueeze(-1)
    found = Fp8().input_gradient([Fp8().gradient(rows)], [torch.ones(OUT, IN)])
    assert torch.equal(found, OUT * rows[:, :1].expand(-1, IN))


def test_nothing_stays_nothing_and_what_is_no_number_is_not_hidden() -> None:
    weight = drawn(OUT, IN, 0.02, torch.bfloat16)
    (none,) = Fp8().outputs(torch.zeros(TOKENS, IN, dtype=torch.bfloat16), [weight], [None])
    assert torch.equal(none, torch.zeros_like(none))
    for bad in (torch.nan, torch.inf):
        x = drawn(TOKENS, IN, 1.0, torch.bfloat16)
        x[3, 5] = bad
        (found,) = Fp8().outputs(x, [weight], [None])
        assert not found[3].isfinite().any()
        assert not Fp8().weight_gradients([Fp8().gradient(x)], x)[0].isfinite().any()


def test_autograd_goes_through_them() -> None:
    x, weight = drawn(TOKENS, IN, 1.0, torch.float32), drawn(OUT, IN, 0.02, torch.float32)
    bias = torch.zeros(OUT)
    for tensor in (x, weight, bias):
        tensor.requires_grad_()
    (y,) = Linears.apply(x, Fp8(), weight, bias)
    scale = drawn(TOKENS, OUT, 1.0, torch.float32)
    (y * scale).sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert apart(x.grad, scale @ weight.detach()) < FP8_ROUNDING
    assert apart(weight.grad, scale.T @ x.detach()) < FP8_ROUNDING
    torch.testing.assert_close(bias.grad, scale.sum(0))


def test_a_gpu_that_multiplies_nothing_so_narrow_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = parse_spec(
        {"model": SIZES["llama"], "train": {"precision": "fp8", "seq_len": 32}, "resources": {"device": "cuda"}}
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA A100")
    monkeypatch.setattr(trainer, "get_local_device", lambda kind: torch.device(kind, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    with pytest.raises(UserError, match=r"fp8 matmuls need compute capability 8\.9 or more, and NVIDIA A100 has 8\.0"):
        trainer._device(spec)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    assert trainer._device(spec).type == "cuda"


def test_sides_that_no_kernel_takes_are_told_with_their_arithmetic() -> None:
    odd = {**SIZES["llama"], "hidden_size": 96, "num_heads": 4, "num_kv_heads": 4, "ffn_hidden_size": 240}
    train = {"global_batch": 2, "seq_len": 20, "precision": "fp8"}
    told = find_unsupported_fields(parse_spec({"model": odd, "layout": {"tp": 2}, "train": train}))
    assert {problem.field for problem in told} == {"train.precision"}
    words = json.dumps([problem.message for problem in told])
    assert "240 / tp 2 = 120 columns per rank in an MLP" in words
    assert "40 tokens per rank in a micro-batch" in words
    assert len(told) == 2
    even = {"model": {**odd, "ffn_hidden_size": 256}, "layout": {"tp": 2}, "train": {**train, "seq_len": 24}}
    assert find_unsupported_fields(parse_spec(even)) == []


def test_compiled_products_with_biases_have_their_gradients() -> None:
    """torch 2.11 gave none to a compiled function that adds in place to a view it returns: on a GPU half of GPT-2 XL's
    gradient was lost."""
    sizes = ((TOKENS, IN), (OUT, IN), (1, OUT))
    x, weight, bias = (drawn(*size, 1.0, torch.bfloat16).requires_grad_() for size in sizes)
    inputs = (x, weight, bias)

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        (y,) = Linears.apply(x.unflatten(0, (2, -1)), Fp8(), weight, bias.flatten())  # type: ignore[no-untyped-call]
        return y

    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    eager, found = (torch.autograd.grad(run(*inputs).square().sum(), inputs) for run in (product, compiled))
    for one, other in zip(found, eager, strict=True):
        assert apart(one, other) < FP8_ROUNDING
