"""Measure rates of one device: matmuls with and without fp8, attention, memory-bound kernels, and launches.

Times are medians between CUDA events, or of the clock on a CPU.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.gpu.rank import build_empty_result, build_parser, set_up_device, synchronize, write_result
from benchmarks.gpu.results import PartOutput
from planner.cost.compute import get_attention_model, tune_accelerator
from planner.hardware.cluster import Accelerator
from planner.hardware.kernel_time import compute_gemm_seconds, compute_kernel_seconds
from planner.hardware.kernels import FlashAttention, Gemm, MemoryKernel
from planner.hardware.stacks import STACKS
from workers.meter.rank_exit import run_and_exit
from workers.trainer.parallel.matmul import E4M3

ROUNDS, WARM_UP = 20, 5
LAUNCHES = 1000
ELEMENT_BYTES = 2  # bf16
TOKENS = 8192


class MatmulShape(NamedTuple):
    """A matmul (m, k) x (k, n) and its source."""

    name: str
    m: int
    n: int
    k: int


class AttentionShape(NamedTuple):
    """Causal attention of `batch` sequences."""

    batch: int
    heads: int
    seq_len: int
    head_dim: int


MATMULS = (
    MatmulShape("square", 8192, 8192, 8192),
    MatmulShape("GPT-3 175B qkv, tp 8", TOKENS, 4608, 12288),
    MatmulShape("GPT-3 175B MLP in, tp 8", TOKENS, 6144, 12288),
    MatmulShape("GPT-2 XL qkv", TOKENS, 4800, 1600),
    MatmulShape("GPT-2 XL MLP in", TOKENS, 6400, 1600),
    MatmulShape("Llama-3 8B attention out", TOKENS, 4096, 4096),
    MatmulShape("Llama-3 8B MLP in", TOKENS, 14336, 4096),
    MatmulShape("Llama-3 8B MLP out", TOKENS, 4096, 14336),
    MatmulShape("Llama-3 8B head", TOKENS, 128256, 4096),
    # Waves of tiles: on 132 multiprocessors one tile more than a whole wave costs a whole wave.
    MatmulShape("one wave of 132 tiles of 128 x 256", 11 * 128, 12 * 256, 4096),
    MatmulShape("a row of tiles more", 12 * 128, 12 * 256, 4096),
    MatmulShape("rows not aligned to 16 bytes", TOKENS, 4097, 4096),
)
SMALL_MATMULS = (MatmulShape("square", 256, 256, 256),)
FP8_MATMULS = ("square", "GPT-2 XL MLP in", "Llama-3 8B MLP in", "Llama-3 8B MLP out")  # tried in fp8 too
ATTENTION = tuple(AttentionShape(4, 4096 // dim, 4096, dim) for dim in (64, 112, 128))
SMALL_ATTENTION = (AttentionShape(1, 2, 128, 64),)
PASS_BYTES, SMALL_PASS_BYTES = 2**31, 2**22


def predict_rates(accelerator: Accelerator, *, small: bool) -> dict[str, float]:
    """Return the rates that plans of the stack use, named as in `measure_rates`. Copies have the device's rate."""
    accelerator, result = tune_accelerator(accelerator, STACKS["ours"]), {}
    for shape in SMALL_MATMULS if small else MATMULS:
        gemm = Gemm(shape.m, shape.n, shape.k)
        result[_format_matmul(shape)] = (
            gemm.flops / compute_gemm_seconds(gemm, accelerator, "bf16", ELEMENT_BYTES) / 1e12
        )
        if accelerator.fp8_flops and shape.name in FP8_MATMULS:
            result[_format_fp8_matmul(shape)] = (
                gemm.flops / compute_gemm_seconds(gemm, accelerator, "fp8", ELEMENT_BYTES) / 1e12
            )
    for heads in SMALL_ATTENTION if small else ATTENTION:
        flash = FlashAttention(
            _count_flops(heads), 4 * _count_elements(heads) * ELEMENT_BYTES, heads.seq_len, heads.head_dim
        )
        both = flash._replace(flops=flash.flops * 7 // 2, num_bytes=3 * flash.num_bytes)  # backward: 5 products to 2
        result[_format_forward(heads)] = flash.flops / _attention_s(flash, accelerator) / 1e12
        result[_format_forward_backward(heads)] = both.flops / _attention_s(both, accelerator) / 1e12
    moved = SMALL_PASS_BYTES if small else PASS_BYTES
    result[COPY] = moved / compute_kernel_seconds(MemoryKernel(moved), accelerator, "bf16", ELEMENT_BYTES) / 1e9
    result[SMALLEST] = accelerator.kernel_s * 1e6
    return result


def _attention_s(flash: FlashAttention, accelerator: Accelerator) -> float:
    law = get_attention_model(accelerator, STACKS["ours"])
    return compute_kernel_seconds(flash, accelerator, "bf16", ELEMENT_BYTES, attention=law.compute_slowdown(flash))


IN_FP8 = "in fp8, cast before, "
COPY, SMALLEST, LAUNCH = "copy, GB/s read and written", "smallest kernel on the device, us", "launch of one add, us"


def _format_matmul(shape: MatmulShape) -> str:
    return f"{shape.name}: {shape.m} x {shape.n} x {shape.k}, TFLOP/s"


def _format_fp8_matmul(shape: MatmulShape) -> str:
    return f"{IN_FP8}{_format_matmul(shape)}"


def _format_forward(heads: AttentionShape) -> str:
    return f"attention, heads of {heads.head_dim}, {heads.seq_len} tokens, forward, TFLOP/s"


def _format_forward_backward(heads: AttentionShape) -> str:
    return f"attention, heads of {heads.head_dim}, {heads.seq_len} tokens, both ways, TFLOP/s"


def _count_elements(heads: AttentionShape) -> int:
    return heads.batch * heads.heads * heads.seq_len * heads.head_dim


def _count_flops(heads: AttentionShape) -> int:
    """Return the FLOPs of two matmuls, halved by the causal mask."""
    return 2 * heads.batch * heads.heads * heads.seq_len**2 * heads.head_dim


def measure_rates(device: torch.device, *, small: bool, narrow: bool) -> PartOutput:
    """Measure all rates. `narrow`: the device has fp8 matmuls."""
    found = build_empty_result()
    measured = found["measured"]

    def tensor(*shape: int, grad: bool = False) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=grad)

    for shape in SMALL_MATMULS if small else MATMULS:
        a, b = tensor(shape.m, shape.k), tensor(shape.n, shape.k)
        product = measure_call_s(lambda a=a, b=b: F.linear(a, b), device)  # type: ignore[misc]
        measured[_format_matmul(shape)] = Gemm(shape.m, shape.n, shape.k).flops / product / 1e12
        if narrow and shape.name in FP8_MATMULS:
            product = measure_call_s(
                partial(_multiply_in_fp8, a.to(E4M3), b.to(E4M3), torch.ones((), device=device)), device
            )
            measured[_format_fp8_matmul(shape)] = Gemm(shape.m, shape.n, shape.k).flops / product / 1e12
    for heads in SMALL_ATTENTION if small else ATTENTION:
        size = (heads.batch, heads.heads, heads.seq_len, heads.head_dim)
        q, k, v = (tensor(*size, grad=True) for _ in range(3))
        gradient = tensor(*size)

        def forward(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def both(
            forward: Callable[[], torch.Tensor] = forward,
            inputs: tuple[torch.Tensor, ...] = (q, k, v),
            gradient: torch.Tensor = gradient,
        ) -> None:
            torch.autograd.grad(forward(), inputs, gradient)

        with torch.no_grad():
            measured[_format_forward(heads)] = _count_flops(heads) / measure_call_s(forward, device) / 1e12
        measured[_format_forward_backward(heads)] = _count_flops(heads) * 3.5 / measure_call_s(both, device) / 1e12
    moved = SMALL_PASS_BYTES if small else PASS_BYTES
    source, target = (torch.empty(moved // 2, device=device, dtype=torch.uint8) for _ in range(2))
    measured[COPY] = moved / measure_call_s(lambda: target.copy_(source), device) / 1e9
    one = torch.ones(1, device=device)
    measured[SMALLEST] = measure_kernel_s(one, device) * 1e6
    measured[LAUNCH] = measure_launch_s(one, device) * 1e6
    found["notes"].append("launch: the host's time for one call of torch, no autograd; the planner's is a layer's mean")
    return found


def _multiply_in_fp8(a: torch.Tensor, b: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    whole = F.ScalingType.TensorWise
    return F.scaled_mm(a, b.T, unit, whole, unit, whole, output_dtype=torch.bfloat16)


def measure_call_s(run: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a call on the device."""
    for _ in range(WARM_UP):
        run()
    if device.type == "cpu":
        return statistics.median(_measure_by_clock(run) for _ in range(ROUNDS))
    timed: Callable[[], Any] = partial(torch.cuda.Event, enable_timing=True)
    pairs = []
    for _ in range(ROUNDS):
        start, end = timed(), timed()
        start.record()
        run()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize(device)
    return statistics.median(float(start.elapsed_time(end)) for start, end in pairs) / 1e3


def _measure_by_clock(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def measure_kernel_s(one: torch.Tensor, device: torch.device) -> float:
    """Return the time of the smallest kernel in a CUDA graph, without the host."""
    if device.type == "cpu":
        return measure_call_s(lambda: one.add_(1), device)
    one.add_(1)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            one.add_(1)
    return measure_call_s(graph.replay, device) / LAUNCHES


def measure_launch_s(one: torch.Tensor, device: torch.device) -> float:
    """Return the time that the host needs to launch a kernel."""
    taken = []
    for _ in range(ROUNDS):
        synchronize(device)
        started = time.perf_counter()
        for _ in range(LAUNCHES // ROUNDS):  # fewer than the device's queue holds
            one.add_(1)
        taken.append((time.perf_counter() - started) / (LAUNCHES // ROUNDS))
    return statistics.median(taken)


def main() -> int:
    parser = build_parser(__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--peak-flops", type=float, help="dense peak in bf16: a rate above it was not timed right")
    parser.add_argument("--peak-fp8", type=float, help="dense peak in fp8, of a device that has such products")
    options = parser.parse_args()
    device = set_up_device(options)
    found = measure_rates(device, small=options.small, narrow=options.peak_fp8 is not None)
    found["wrong"] += list_impossible_rates(
        found["measured"], options.peak_flops or math.inf, options.peak_fp8 or math.inf
    )
    write_result(options.out, found)
    return 0


def list_impossible_rates(measured: Mapping[str, float], peak_flops: float, peak_fp8: float) -> list[str]:
    """Return rates that exceed the peaks of the device."""
    rates = {name: rate * 1e12 for name, rate in measured.items() if name.endswith("TFLOP/s")}
    peaks = {name: peak_fp8 if name.startswith(IN_FP8) else peak_flops for name in rates}
    return [f"{name}: {rate:.3g} is above the peak" for name, rate in rates.items() if rate > peaks[name]]


if __name__ == "__main__":
    run_and_exit(main)
