"""fp8 matmuls match the scaled kernel of torch, with one power-of-two scale per tensor."""

from __future__ import annotations

import json

import pytest
import torch

from planner.facts.parse_spec import parse_spec
from planner.facts.spec_rules import find_unsupported_fields
from tests.parity.cases import SIZES
from workers.trainer import __main__ as trainer
from workers.trainer.errors import UserError
from workers.trainer.parallel.matmul import UNQUANTIZED, Fp8Matmuls, LinearFunction

TOKENS, IN, OUT = 32, 64, 48
FP8_ROUNDING = 0.08  # relative error of a sum of products, with each term rounded to 3 bits or 2


def drawn(rows: int, columns: int, size: float, kind: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns)) * size).to(kind)


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_fp8_matmuls_match_fp32_within_rounding(kind: torch.dtype) -> None:
    weights = [drawn(OUT, IN, 0.02, kind), drawn(OUT + 16, IN, 0.02, kind)]
    x, grads = drawn(TOKENS, IN, 3.0, kind), [drawn(TOKENS, len(w), 1e-6, kind) for w in weights]
    biases = [None, drawn(1, OUT + 16, 1.0, kind).flatten()]
    found, wanted = [], []
    for products, into in ((Fp8Matmuls(), found), (UNQUANTIZED, wanted)):
        rows = [products.quantize_gradient(grad) for grad in grads]
        into += products.outputs(x.unflatten(0, (2, -1)), weights, biases)
        into += [products.input_gradient(rows, weights), *products.weight_gradients(rows, x)]
    for one, other in zip(found, wanted, strict=True):
        assert (one.shape, one.dtype) == (other.shape, kind)
        assert 0.001 < apart(one, other) < FP8_ROUNDING


def test_rounding_does_not_depend_on_other_elements() -> None:
    x, weight = drawn(TOKENS, IN, 1.0, torch.float32), drawn(OUT, IN, 0.02, torch.float32)
    x += x.sign() * 0.5  # the smallest have fewer bits
    louder = torch.cat((x, torch.full((16, IN), 77.0)))  # like the shard of another rank
    (alone,), (beside,) = (Fp8Matmuls().outputs(rows, [weight], [None]) for rows in (x, louder))
    assert torch.equal(alone, beside[:TOKENS])


def test_gradients_use_e5m2() -> None:
    """A ratio of 2^22 exceeds the range of E4M3."""
    rows = torch.ones(TOKENS, OUT) * torch.tensor([1.0, 2.0**-22]).repeat(TOKENS // 2).unsqueeze(-1)
    found = Fp8Matmuls().input_gradient([Fp8Matmuls().quantize_gradient(rows)], [torch.ones(OUT, IN)])
    assert torch.equal(found, OUT * rows[:, :1].expand(-1, IN))


def test_keeps_zeros_and_nan() -> None:
    weight = drawn(OUT, IN, 0.02, torch.bfloat16)
    (none,) = Fp8Matmuls().outputs(torch.zeros(TOKENS, IN, dtype=torch.bfloat16), [weight], [None])
    assert torch.equal(none, torch.zeros_like(none))
    for bad in (torch.nan, torch.inf):
        x = drawn(TOKENS, IN, 1.0, torch.bfloat16)
        x[3, 5] = bad
        (found,) = Fp8Matmuls().outputs(x, [weight], [None])
        assert not found[3].isfinite().any()
        assert not Fp8Matmuls().weight_gradients([Fp8Matmuls().quantize_gradient(x)], x)[0].isfinite().any()


def test_supports_autograd() -> None:
    x, weight = drawn(TOKENS, IN, 1.0, torch.float32), drawn(OUT, IN, 0.02, torch.float32)
    bias = torch.zeros(OUT)
    for tensor in (x, weight, bias):
        tensor.requires_grad_()
    (y,) = LinearFunction.apply(x, Fp8Matmuls(), weight, bias)
    scale = drawn(TOKENS, OUT, 1.0, torch.float32)
    (y * scale).sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert apart(x.grad, scale @ weight.detach()) < FP8_ROUNDING
    assert apart(weight.grad, scale.T @ x.detach()) < FP8_ROUNDING
    torch.testing.assert_close(bias.grad, scale.sum(0))


def test_names_a_gpu_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = parse_spec(
        {"model": SIZES["llama"], "train": {"precision": "fp8", "seq_len": 32}, "resources": {"device": "cuda"}}
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA A100")
    monkeypatch.setattr(trainer, "get_local_device", lambda kind: torch.device(kind, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    with pytest.raises(UserError, match=r"fp8 matmuls need compute capability 8\.9 or more, and NVIDIA A100 has 8\.0"):
        trainer.select_device(spec)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    assert trainer.select_device(spec).type == "cuda"


def test_rejects_sizes_that_no_fp8_kernel_supports() -> None:
    odd = {**SIZES["llama"], "hidden_size": 96, "num_heads": 4, "num_kv_heads": 4, "ffn_hidden_size": 240}
    train = {"global_batch": 2, "seq_len": 20, "precision": "fp8"}
    result = find_unsupported_fields(parse_spec({"model": odd, "layout": {"tp": 2}, "train": train}))
    assert {problem.field for problem in result} == {"train.precision"}
    words = json.dumps([problem.message for problem in result])
    assert "240 / tp 2 = 120 columns per rank in an MLP" in words
    assert "40 tokens per rank in a micro-batch" in words
    assert len(result) == 2
    even = {"model": {**odd, "ffn_hidden_size": 256}, "layout": {"tp": 2}, "train": {**train, "seq_len": 24}}
    assert find_unsupported_fields(parse_spec(even)) == []


def test_compiled_matmuls_with_biases_have_gradients() -> None:
    """torch 2.11 lost gradients of compiled functions that add in place to a returned view."""
    sizes = ((TOKENS, IN), (OUT, IN), (1, OUT))
    x, weight, bias = (drawn(*size, 1.0, torch.bfloat16).requires_grad_() for size in sizes)
    inputs = (x, weight, bias)

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        (y,) = LinearFunction.apply(x.unflatten(0, (2, -1)), Fp8Matmuls(), weight, bias.flatten())  # type: ignore[no-untyped-call]
        return y

    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    eager, found = (torch.autograd.grad(run(*inputs).square().sum(), inputs) for run in (product, compiled))
    for one, other in zip(found, eager, strict=True):
        assert apart(one, other) < FP8_ROUNDING
