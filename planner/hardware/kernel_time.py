"""Compute the time of matmuls, attention, memory-bound kernels, and collectives.

Sources of the attention constants (bf16, causal, head dim 128, forward and backward):

- Hopper: Transformer Engine's docs/examples/attention/attention.ipynb. cuDNN takes 0.3664 ms for 32 heads of 2,048
  tokens and 7.4875 ms for 64 heads of 8,192 tokens. That fits rows with 1,900 extra tokens. FlashAttention 2 takes 1.6
  times as long in both cases.
- Blackwell: NVIDIA/cudnn-frontend, benchmark/sdpa_benchmark_training/results, April 2026, cuDNN 9.22. On a GB200,
  64 heads take 0.514, 1.589, and 5.524 ms for two rows of 2,048, 4,096, and 8,192 tokens. That fits 1,600 extra
  tokens. A GB300 takes 0.90 of that.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from contracts.telemetry.items import Op
from planner.facts.collectives import get_bus_factor
from planner.facts.precision import GemmType
from planner.hardware.cluster import Accelerator, Cluster, NodeSpan
from planner.hardware.kernels import FlashAttention, Gemm, Kernel, MemoryKernel

# Fraction of the rate if rows of a half-precision operand are not aligned to 16 bytes.
UNALIGNED_RATE = 0.1


# (rows, columns, fraction of the best rate). Smaller tiles reuse less of the data that they load.
GEMM_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.94), (128, 64, 0.8), (64, 128, 0.8), (64, 64, 0.62))


def compute_gemm_seconds(gemm: Gemm, accelerator: Accelerator, kind: GemmType, element_bytes: int) -> float:
    """Return the time of a matmul: waves of the best tile, or memory time if longer."""
    return _compute_gemm_seconds(gemm, accelerator, kind, element_bytes)


@cache
def _compute_gemm_seconds(gemm: Gemm, accelerator: Accelerator, kind: GemmType, element_bytes: int) -> float:
    m, n, k, batch, wide, _, over_rows = gemm
    kind = "bf16" if kind == "fp8" and (wide or not accelerator.fp8_flops) else kind
    share = accelerator.fp8_efficiency if kind == "fp8" else accelerator.gemm_efficiency
    aligned = kind == "fp32" or not (n % 8 or (k % 8 and not over_rows))
    per_sm = accelerator.get_peak_flops(kind) * share * (1 if aligned else UNALIGNED_RATE) / accelerator.num_sms

    def tiled(rows: int, columns: int, reach: float) -> float:
        waves = -(-(-(-m // rows) * -(-n // columns) * batch) // accelerator.num_sms)
        return waves * 2 * rows * columns * k / (per_sm * reach)

    products = min(tiled(*tile) for tile in GEMM_TILES)
    moved = batch * (m * k + k * n + m * n) * element_bytes
    return max(products, moved / (accelerator.bytes_per_s * accelerator.memory_efficiency)) + accelerator.kernel_s


def compute_kernel_seconds(
    kernel: Kernel, accelerator: Accelerator, kind: GemmType, element_bytes: int, *, attention: float = 1.0
) -> float:
    """Return the device time of one kernel.

    Args:
        attention: Slowdown of attention compared with its best rate.
    """
    if isinstance(kernel, Gemm):
        return _compute_gemm_seconds(kernel, accelerator, kind, element_bytes)
    moved = kernel.num_bytes / (accelerator.bytes_per_s * accelerator.memory_efficiency)
    if isinstance(kernel, MemoryKernel):
        return moved + accelerator.kernel_s
    assert isinstance(kernel, FlashAttention)
    peak = accelerator.get_peak_flops("fp32" if kind == "fp32" else "bf16")
    products = attention * kernel.flops / (peak * accelerator.attention_efficiency)
    return max(products, moved) + accelerator.kernel_s


def compute_collective_seconds(op: Op, payload_bytes: float, group: NodeSpan, cluster: Cluster) -> float:
    """Return the alpha-beta time of one collective (nccl src/graph/tuning.cc).

    The latency is that of a tree of nodes. The bytes move in rings over the slowest link.
    Each rank has its own link to the network, so a group has as many rings between nodes as ranks per node.
    In an all-to-all, each rank sends its own share to the other nodes.
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


# Heads of 64 in the Blackwell runs above, with windows of 128 or 1,024 tokens: five times on a GB200 fit 0.80 of a
# score's time and 0.63 of the row overhead at head dim 128, within 7%. On an H200 (cuDNN 9.19, 1,024 tokens) the score
# factor is 0.65.
NARROW_HEAD_DIM, NARROW_ROW_FACTOR = 64, 0.63


# Keys of 192 and values of 128 (DeepSeek) in the same runs take 1.10 and 1.12 times as long per FLOP at 4,096 and 8,192
# tokens.
WIDE_HEAD_DIM = 128


class AttentionRates(NamedTuple):
    """Rates of fused attention on an accelerator.

    `peak_factor`: factor on the accelerator's attention efficiency for the longest rows.
    `extra_tokens`: tokens that the overhead adds to each row.
    `narrow_factor`: time per score with heads of 64, relative to heads of 128.
    `pads_heads`: heads are padded to the next tile. `wide_factor`: time per FLOP of heads above 128.
    """

    peak_factor: float = 1.0
    extra_tokens: int = 0
    narrow_factor: float = 0.5
    pads_heads: bool = False
    wide_factor: float = 1.0

    def compute_slowdown(self, flash: FlashAttention) -> float:
        """Return the time relative to the rate of the longest rows with heads of 128."""
        width = _pad_head_dim(flash.width) if self.pads_heads else flash.width
        beyond = min(
            1.0, max(0.0, (width - NARROW_HEAD_DIM) / (WIDE_HEAD_DIM - NARROW_HEAD_DIM))
        )  # 0 for narrow heads, 1 for wide heads
        score = self.narrow_factor + beyond * (1 - self.narrow_factor)
        rows = NARROW_ROW_FACTOR + beyond * (1 - NARROW_ROW_FACTOR)
        share_of_wide = min(max(width, NARROW_HEAD_DIM), WIDE_HEAD_DIM) / WIDE_HEAD_DIM
        padded = width / flash.width * (self.wide_factor if width > WIDE_HEAD_DIM else 1)
        return padded * (score + rows * self.extra_tokens / flash.tokens) / share_of_wide


def _pad_head_dim(width: int) -> int:
    step = 32 if width <= WIDE_HEAD_DIM else 64
    return -(-width // step) * step


FLASH_2_FACTOR = 1 / 1.6  # Fraction of cuDNN's rate on Hopper.
# `peak_factor` is from NVIDIA's rows of 16,384 to a million tokens, whose time is mostly attention. 0.53 of peak on an
# H100 fits all four rows within 1%. 0.55 on a Blackwell fits two of the other three within 1% and 7%.
CUDNN_HOPPER = AttentionRates(peak_factor=1.585, extra_tokens=1900, narrow_factor=0.65, pads_heads=True)
CUDNN_BLACKWELL = AttentionRates(peak_factor=1.475, extra_tokens=1600, narrow_factor=0.8, wide_factor=1.11)
# Factors of other software depend on head size only: the accelerator's efficiency is that of heads of 128.
# FlashAttention 2 has the same kernels on A100 and H100. 2407.08608 (figures 5 and 6, 4,096 tokens, no mask) reports
# forward 321 TFLOP/s with heads of 64 and 368 with 128, and backward 279 and 310: together 0.90. Its code pads heads to
# multiples of 32, and to multiples of 64 above 128 (flash_api.cpp). FlashAttention 1's rows with heads of 64 (fsdp1)
# fit the factors of heads of 128.
FLASH_1_WIDTHS = AttentionRates(pads_heads=True)
FLASH_2_WIDTHS = AttentionRates(narrow_factor=0.56, pads_heads=True)
BLACKWELL_WIDTHS = CUDNN_BLACKWELL._replace(peak_factor=1.0, extra_tokens=0)
# Attention of torch 2.11 on an H100, forward and backward, rows of 4,096 tokens (docs/notebook/2026-11-gpu.md): 386,
# 434, and 484 TFLOP/s for heads of 64, 112, and 128. cuDNN of arXiv 2407.08608 loses the time of 300 tokens per row.
SDPA_HOPPER = AttentionRates(peak_factor=1.565, extra_tokens=300, narrow_factor=0.63, pads_heads=True)
