"""Products of runs of rows, each with a matrix of its own, as one operation forward and two backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import register_flop_formula

ALIGNED_BYTES = 16  # torch's grouped kernel takes no other rows
GPU_GENERATION = 8


@torch.library.custom_op("meshboard::grouped_product", mutates_args=())
def grouped_product(rows: torch.Tensor, matrices: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """(rows, in) in runs of `counts`, (runs, out, in) -> (rows, out): each run times its matrix, transposed."""
    if _takes_kernel(rows, matrices.shape[1:]):
        return F.grouped_mm(rows.contiguous(), matrices.transpose(-1, -2), offs=_ends(counts, rows.device))
    out = rows.new_empty(len(rows), matrices.shape[1])
    for run, matrix, into in zip(rows.split(counts), matrices, out.split(counts), strict=True):
        torch.mm(run, matrix.T, out=into)
    return out


@torch.library.custom_op("meshboard::grouped_outer", mutates_args=())
def grouped_outer(left: torch.Tensor, right: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """(rows, out), (rows, in) -> (runs, out, in): each run of the one, transposed, times that of the other."""
    if _takes_kernel(left, (left.shape[1], right.shape[1])):
        product = F.grouped_mm(left.contiguous().T, right.contiguous(), offs=_ends(counts, left.device))
        for run, count in enumerate(counts):
            if not count:
                product[run].zero_()  # on some GPUs the kernel leaves there what was in memory (pytorch 172439)
        return product
    out = left.new_empty(len(counts), left.shape[1], right.shape[1])
    for a, b, into in zip(left.split(counts), right.split(counts), out, strict=True):
        torch.mm(a.T, b, out=into)
    return out


def _takes_kernel(rows: torch.Tensor, sizes: tuple[int, ...] | torch.Size) -> bool:
    if any(size * rows.element_size() % ALIGNED_BYTES for size in sizes):
        return False
    if not rows.is_cuda:
        return True
    return rows.dtype == torch.bfloat16 and torch.cuda.get_device_capability(rows.device)[0] >= GPU_GENERATION


def _ends(counts: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).to(device, torch.int32)


@grouped_product.register_fake
def _product_shape(rows: torch.Tensor, matrices: torch.Tensor, counts: list[int]) -> torch.Tensor:
    return rows.new_empty(len(rows), matrices.shape[1])


@grouped_outer.register_fake
def _outer_shape(left: torch.Tensor, right: torch.Tensor, counts: list[int]) -> torch.Tensor:
    return left.new_empty(len(counts), left.shape[1], right.shape[1])


def _keep(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor, list[int]], output: torch.Tensor) -> None:
    rows, matrices, ctx.counts = inputs
    ctx.save_for_backward(rows, matrices)


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    rows, matrices = ctx.saved_tensors
    return grouped_product(grad, matrices.transpose(-1, -2), ctx.counts), grouped_outer(grad, rows, ctx.counts), None


grouped_product.register_autograd(_gradients, setup_context=_keep)


@register_flop_formula(torch.ops.meshboard.grouped_product)
def _product_flops(rows: Any, matrices: Any, counts: Any, out_shape: Any = None, **_: Any) -> int:
    return 2 * int(rows[0]) * int(matrices[1]) * int(matrices[2])


@register_flop_formula(torch.ops.meshboard.grouped_outer)
def _outer_flops(left: Any, right: Any, counts: Any, out_shape: Any = None, **_: Any) -> int:
    return 2 * int(left[0]) * int(left[1]) * int(right[1])
