"""TODO.

How long fused attention takes on a generation of accelerators, over its products at the best rate that it reaches.

Hopper: Transformer Engine's docs/examples/attention/attention.ipynb (head dimension 128, causal, forward and backward):
cuDNN's takes 0.3664 ms for 32 heads of 2,048 tokens and 7.4875 ms for 64 of 8,192, 32 times the work, as if 1,900
tokens more stood in each row; FlashAttention 2 takes 1.6 times as long for either. Blackwell: what
NVIDIA/cudnn-frontend keeps of its own runs (benchmark/sdpa_benchmark_training/results, bf16, causal, April 2026, cuDNN
9.22): 64 heads of 128 take 0.514, 1.589 and 5.524 ms for two rows of 2,048, 4,096 and 8,192 tokens on a GB200, as if
1,600 tokens more stood in each; a GB300 takes 0.90 of that. Until 9.13 its runs (commits f937055 and be6c079, on a B200
and a GB300) lose as much as 3,100 tokens, and reach nine tenths of the later share.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from contracts.telemetry.vocabulary import Op
from planner.facts.collectives import get_bus_factor
from planner.facts.precision import GemmType
from planner.hardware.cluster import Accelerator, Cluster, Span
from planner.hardware.kernels import Flash, Gemm, Kernel, Pass

# Tiles of a product and what each reaches of the best: a smaller tile reuses less of what it loads.
UNALIGNED = 0.1  # of the rate, where rows of a half-precision operand do not begin at multiples of 16 bytes


TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.94), (128, 64, 0.8), (64, 128, 0.8), (64, 64, 0.62))


def gemm_seconds(gemm: Gemm, accelerator: Accelerator, kind: GemmType, element_bytes: int) -> float:
    """The best tile's waves over the multiprocessors, or the memory's time where that is longer."""
    return _gemm_seconds(gemm, accelerator, kind, element_bytes)


@cache
def _gemm_seconds(gemm: Gemm, accelerator: Accelerator, kind: GemmType, element_bytes: int) -> float:
    m, n, k, batch, wide, _, over_rows = gemm
    kind = "bf16" if kind == "fp8" and (wide or not accelerator.fp8_flops) else kind
    share = accelerator.fp8_efficiency if kind == "fp8" else accelerator.gemm_efficiency
    aligned = kind == "fp32" or not (n % 8 or (k % 8 and not over_rows))
    per_sm = accelerator.peak(kind) * share * (1 if aligned else UNALIGNED) / accelerator.num_sms

    def tiled(rows: int, columns: int, reach: float) -> float:
        waves = -(-(-(-m // rows) * -(-n // columns) * batch) // accelerator.num_sms)
        return waves * 2 * rows * columns * k / (per_sm * reach)

    products = min(tiled(*tile) for tile in TILES)
    moved = batch * (m * k + k * n + m * n) * element_bytes
    return max(products, moved / (accelerator.bytes_per_s * accelerator.memory_efficiency)) + accelerator.kernel_s


def kernel_seconds(
    kernel: Kernel, accelerator: Accelerator, kind: GemmType, element_bytes: int, *, attention: float = 1.0
) -> float:
    """Time of one kernel on the device. `attention`: how many times as long its products take as at their best rate."""
    if isinstance(kernel, Gemm):
        return _gemm_seconds(kernel, accelerator, kind, element_bytes)
    moved = kernel.num_bytes / (accelerator.bytes_per_s * accelerator.memory_efficiency)
    if isinstance(kernel, Pass):
        return moved + accelerator.kernel_s
    assert isinstance(kernel, Flash)
    peak = accelerator.peak("fp32" if kind == "fp32" else "bf16")
    products = attention * kernel.flops / (peak * accelerator.attention_efficiency)
    return max(products, moved) + accelerator.kernel_s


def collective_seconds(op: Op, payload_bytes: float, group: Span, cluster: Cluster) -> float:
    """Alpha-beta time of one collective: the latency of a tree of nodes, the bytes of rings over the slowest link
    (nccl src/graph/tuning.cc, shape of its model).

    Every rank has its own way out of its node: as many rings leave it as a group has ranks there, while in an
    all-to-all each rank sends its own share to the other nodes.
    """
    n = group.per_node * group.nodes
    if n <= 1:
        return 0.0
    if op == "barrier":
        return cluster.base_s
    inside = cluster.node.bytes_per_s * cluster.node.efficiency
    out = cluster.network.bytes_per_s * cluster.network.efficiency
    if op in ("send", "recv"):
        link, bandwidth = (cluster.node, inside) if group.nodes == 1 else (cluster.network, out)
        return cluster.base_s + link.latency_s + payload_bytes / bandwidth
    hops = (group.per_node - 1) * cluster.node.latency_s
    if group.nodes > 1:
        hops += (group.nodes - 1).bit_length() * cluster.network.latency_s
    latency = cluster.base_s + (2 if op == "all_reduce" else 1) * hops
    if group.nodes == 1:
        return latency + get_bus_factor(op, n) * payload_bytes / inside
    if op == "all_to_all":
        near, far = (group.per_node - 1) / n, (group.nodes - 1) / group.nodes
        return latency + payload_bytes * max(near / inside, far / out)
    return latency + get_bus_factor(op, n) * payload_bytes / min(inside, group.per_node * out)


# Heads of 64 among the same runs, with each query looking back 128 or 1,024 tokens: five times on a GB200 lie within
# 7% of 0.80 of a score's time and 0.63 of a row's loss at heads of 128; on an H200 (cuDNN 9.19, 1,024 tokens) 0.65.
NARROW, NARROW_ROWS = 64, 0.63


# Keys of 192 and values of 128 (DeepSeek's) there: 1.10 and 1.12 times as long for their products at 4,096 and 8,192
# tokens. In mxfp8 they take 0.73 of bf16's time on a GB300, heads of 128 as long, and heads of 64 that look back 128 of
# 4,096 tokens 3.4 times as long (2.290 ms for 0.675), for backward computes all scores: 1.5 times both kinds of layer.
WIDEST = 128
FP8_LATENT, FP8_WINDOWED = 0.73, 1.5


class Attention(NamedTuple):
    """`share`: of the accelerator's own efficiency, that the longest rows reach. `tokens`: that each row seems longer
    by. `narrow`: a score's time in heads of 64 over that in heads of 128, which have twice its products. `pads`: heads
    are computed as if they were as wide as the next tile. `wide`: the time of wider heads' products."""

    share: float = 1.0
    tokens: int = 0
    narrow: float = 0.5
    pads: bool = False
    wide: float = 1.0

    def times(self, flash: Flash) -> float:
        """Over the time of its products at the rate of the longest rows of heads of 128."""
        width = _tile(flash.width) if self.pads else flash.width
        beyond = min(1.0, max(0.0, (width - NARROW) / (WIDEST - NARROW)))  # narrow heads to wide ones
        score = self.narrow + beyond * (1 - self.narrow)
        rows = NARROW_ROWS + beyond * (1 - NARROW_ROWS)
        share_of_wide = min(max(width, NARROW), WIDEST) / WIDEST
        padded = width / flash.width * (self.wide if width > WIDEST else 1)
        return padded * (score + rows * self.tokens / flash.tokens) / share_of_wide


def _tile(width: int) -> int:
    step = 32 if width <= WIDEST else 64
    return -(-width // step) * step


FLASH_2 = 1 / 1.6  # of cuDNN's rate on Hopper
# Shares are what NVIDIA's rows of 16,384 tokens to a million show, most of whose time is attention: all four of the fit
# half are met within 1% by 0.53 of peak on an H100, and two of the other three within 1 and 7% by 0.55 on a Blackwell,
# before cuDNN 9.13 by eight tenths of that.
CUDNN_HOPPER = Attention(share=1.585, tokens=1900, narrow=0.65, pads=True)
CUDNN_BLACKWELL = Attention(share=1.475, tokens=1600, narrow=0.8, wide=1.11)
EARLY_CUDNN_BLACKWELL = CUDNN_BLACKWELL._replace(share=0.8 * CUDNN_BLACKWELL.share, tokens=3100)
# Of other software what depends on heads alone: the accelerator's own efficiency is that of heads of 128 in its rows.
# FlashAttention 2 runs the same kernels on an A100 and an H100; 2407.08608 has its rates there (figures 5 and 6, 4,096
# tokens, no mask): forward 321 TFLOP/s by heads of 64 and 368 by heads of 128, backward 279 and 310, together 0.90. Its
# code rounds heads up to multiples of 32, beyond 128 of 64 (flash_api.cpp). FlashAttention 1's rows with heads of 64
# (fsdp1) are met as heads of 128 are, so that these cost it nothing.
FLASH_1_WIDTHS = Attention(pads=True)
FLASH_2_WIDTHS = Attention(narrow=0.56, pads=True)
BLACKWELL_WIDTHS = CUDNN_BLACKWELL._replace(share=1.0, tokens=0)
# Attention of torch 2.11 on an H100, forward and backward, rows of 4,096 tokens (docs/notebook/2026-11-gpu.md): 386,
# 434, and 484 TFLOP/s for heads of 64, 112, and 128. cuDNN of arXiv 2407.08608 loses the time of 300 tokens per row.
SDPA_HOPPER = Attention(share=1.565, tokens=300, narrow=0.63, pads=True)
