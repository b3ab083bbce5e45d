"""Matmuls of linear layers, in the dtype of the input or in fp8, and deferred weight gradients.

fp8 uses dynamic scaling with one scale per tensor, like torchao (2209.05433, section 3). Inputs and weights are E4M3,
gradients are E5M2, and sums have a higher precision. Scales are powers of two, so an element is rounded in the same way
on every rank.

Zero-bubble schedules split backward (2401.10241, section 3). They pass input gradients on first (I), and compute weight
gradients later, when a rank would idle (W). A layer that uses a parameter through `WeightGradients` hides it from
autograd. The weight gradient is stored as a deferred matmul in the bag of its micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MIN_ABS_MAX = 1e-12  # lower bound of the largest element
EXPONENT_MASK = 0x7F800000  # exponent bits of fp32, which give the next lower power of two
Operand = Any  # result of `quantize_gradient`
AddGradient = Callable[[torch.Tensor | None], torch.Tensor]  # maps the accumulated gradient to the new sum
Bag = list[tuple[torch.Tensor, AddGradient]]


class Matmuls:
    """Compute the matmuls of an input (..., in) with weights (out, in). `rows` are output gradients, (tokens, out)."""

    def outputs(
        self, x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor, ...]:
        """Return x W^T + b for each weight, (..., out)."""
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    def quantize_gradient(self, rows: torch.Tensor) -> Operand:
        """Prepare an output gradient for both matmuls of backward."""
        return rows

    def input_gradient(self, rows: Sequence[Operand], weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the input gradient (tokens, in), summed over the outputs."""
        total: torch.Tensor = rows[0] @ weights[0]
        for row, weight in zip(rows[1:], weights[1:], strict=True):
            total.addmm_(row, weight)
        return total

    def weight_gradients(self, rows: Sequence[Operand], entered: torch.Tensor) -> list[torch.Tensor]:
        """Return the weight gradients, (out, in) each. `entered` is the input, (tokens, in)."""
        return [row.T @ entered for row in rows]

    def add_weight_gradient(self, accumulated: torch.Tensor, rows: torch.Tensor, entered: torch.Tensor) -> torch.Tensor:
        """Add a weight gradient to `accumulated` in place."""
        return accumulated.addmm_(rows.T, entered)


class Fp8Matmuls(Matmuls):
    """Compute matmuls with all operands in fp8. Results have the dtype of the operands."""

    def outputs(
        self, x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor, ...]:
        entered = _quantize(x.flatten(0, -2), E4M3)
        product = [_scaled_matmul(entered, _quantize(weight, E4M3).transpose(), x.dtype) for weight in weights]
        whole = [y if bias is None else y.add_(bias) for y, bias in zip(product, biases, strict=True)]
        return tuple(y.view(*x.shape[:-1], -1) for y in whole)

    def quantize_gradient(self, rows: torch.Tensor) -> Operand:
        return rows.dtype, _quantize(rows, E5M2)

    def input_gradient(self, rows: Sequence[Operand], weights: Sequence[torch.Tensor]) -> torch.Tensor:
        total: torch.Tensor | None = None
        for (kind, row), weight in zip(rows, weights, strict=True):
            product = _scaled_matmul(row, _quantize(weight, E4M3).by_columns(), kind)
            total = product if total is None else total.add_(product)
        assert total is not None
        return total

    def weight_gradients(self, rows: Sequence[Operand], entered: torch.Tensor) -> list[torch.Tensor]:
        columns = _quantize(entered, E4M3).by_columns()
        return [_scaled_matmul(row.transpose().by_rows(), columns, kind) for kind, row in rows]

    def add_weight_gradient(self, accumulated: torch.Tensor, rows: torch.Tensor, entered: torch.Tensor) -> torch.Tensor:
        (product,) = self.weight_gradients([self.quantize_gradient(rows)], entered)
        return accumulated.add_(product)


class _QuantizedMatrix(NamedTuple):
    """Store a matrix in 8 bits. An element has the value `data * unit`, with `unit` in fp32."""

    data: torch.Tensor
    unit: torch.Tensor

    def transpose(self) -> _QuantizedMatrix:
        return self._replace(data=self.data.T)

    def by_rows(self) -> _QuantizedMatrix:
        return self._replace(data=self.data.contiguous())

    def by_columns(self) -> _QuantizedMatrix:
        """Return the layout of a second operand. Before Blackwell, the kernel accepts no other layout."""
        return self._replace(data=self.data.T.contiguous().T)


def _quantize(x: torch.Tensor, kind: torch.dtype) -> _QuantizedMatrix:
    largest = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32).clamp_(min=MIN_ABS_MAX)
    scale = ((torch.finfo(kind).max / largest).view(torch.int32) & EXPONENT_MASK).view(torch.float32)
    # fp8 has no infinity, so the unit becomes NaN if an element is not finite.
    return _QuantizedMatrix((x * scale).to(kind), scale.reciprocal() + 0 * largest)


def _scaled_matmul(a: _QuantizedMatrix, b: _QuantizedMatrix, kind: torch.dtype) -> torch.Tensor:
    """Multiply (m, k) x (k, n) -> (m, n)."""
    whole = F.ScalingType.TensorWise
    return F.scaled_mm(a.data, b.data, a.unit, whole, b.unit, whole, output_dtype=kind)


class LinearFunction(torch.autograd.Function):
    """Compute x W^T + b for each (W, b). Weights come first, followed by the biases or None."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, matmuls: Matmuls, *parameters: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = split_parameters(parameters)
        ctx.matmuls, ctx.biased = matmuls, [bias is not None for bias in biases]
        ctx.save_for_backward(x, *weights)
        return matmuls.outputs(x, weights, biases)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        flat = [grad.flatten(0, -2) for grad in grads]
        rows = [ctx.matmuls.quantize_gradient(row) for row in flat]
        entered_grad = ctx.matmuls.input_gradient(rows, weights).view_as(x)
        weight_grads = ctx.matmuls.weight_gradients(rows, x.flatten(0, -2))
        bias_grads = [row.sum(0) if biased else None for row, biased in zip(flat, ctx.biased, strict=True)]
        return entered_grad, None, *weight_grads, *bias_grads


def split_parameters(
    parameters: Sequence[torch.Tensor | None],
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor | None]]:
    """Split an argument list into weights and biases."""
    middle = len(parameters) // 2
    return parameters[:middle], parameters[middle:]  # type: ignore[return-value]


UNQUANTIZED = Matmuls()


def _accumulate(value: torch.Tensor, parameter: torch.Tensor, accumulated: torch.Tensor | None) -> torch.Tensor:
    value = value.to(parameter.dtype)
    return value if accumulated is None else accumulated.add_(value)


class _Linear(torch.autograd.Function):
    """Compute y = x W^T + b. Backward returns the input gradient, and defers the other gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, bag: Bag, matmuls: Matmuls
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.bag, ctx.matmuls = weight, bias, bag, matmuls
        (out,) = matmuls.outputs(x, [weight.to(x.dtype)], [None if bias is None else bias.to(x.dtype)])
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (x,) = ctx.saved_tensors
        weight, bias, rows = ctx.weight, ctx.bias, grad.flatten(0, -2)
        matmuls: Matmuls = ctx.matmuls

        def add_product(accumulated: torch.Tensor | None) -> torch.Tensor:
            entered = x.flatten(0, -2)
            if accumulated is not None and accumulated.dtype == x.dtype:
                return matmuls.add_weight_gradient(accumulated, rows, entered)
            (product,) = matmuls.weight_gradients([matmuls.quantize_gradient(rows)], entered)
            return _accumulate(product, weight, accumulated)

        ctx.bag.append((weight, add_product))
        if bias is not None:
            ctx.bag.append((bias, lambda accumulated: _accumulate(rows.sum(0), bias, accumulated)))
        input_grad = matmuls.input_gradient([matmuls.quantize_gradient(rows)], [weight.to(grad.dtype)])
        return input_grad.view_as(x), None, None, None, None


class _DeferredParameter(torch.autograd.Function):
    """Return a parameter unchanged. Its gradient is stored in the bag."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, bag: Bag) -> torch.Tensor:
        ctx.weight, ctx.bag = weight, bag
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        weight = ctx.weight
        ctx.bag.append((weight, lambda accumulated: _accumulate(grad, weight, accumulated)))
        return None, None


class WeightGradients:
    """Store the bags of micro-batches between I and W. Set `micro_batch` before each forward and backward."""

    def __init__(self) -> None:
        self.micro_batch = 0
        self._bags: dict[int, Bag] = {}

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, matmuls: Matmuls = UNQUANTIZED
    ) -> torch.Tensor:
        """Compute F.linear with a deferred weight gradient."""
        return _Linear.apply(x, weight, bias, self._bag(), matmuls)  # type: ignore[no-any-return]

    def defer(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the parameter for other uses, with a deferred gradient."""
        return _DeferredParameter.apply(weight, self._bag())  # type: ignore[no-any-return]

    @torch.no_grad()
    def add(self, micro_batch: int) -> list[torch.Tensor]:
        """Add the deferred gradients of a micro-batch, and return their parameters."""
        bag = self._bags.pop(micro_batch, [])
        added: dict[torch.Tensor, None] = {}
        bag.reverse()
        # Operands are freed after each matmul. An abandoned bag would leak, because its tensors reference the graph,
        # and the graph references the bag.
        while bag:
            parameter, summed = bag.pop()
            parameter.grad = summed(parameter.grad)
            added[parameter] = None
        return list(added)

    def _bag(self) -> Bag:
        return self._bags.setdefault(self.micro_batch, [])
