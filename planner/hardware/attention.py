"""How long fused attention takes on a generation of accelerators, over its products at the best rate that it reaches.

Hopper: Transformer Engine's docs/examples/attention/attention.ipynb (head dimension 128, causal, forward and backward):
cuDNN's takes 0.3664 ms for 32 heads of 2,048 tokens and 7.4875 ms for 64 of 8,192, 32 times the work, as if 1,900
tokens more stood in each row; FlashAttention 2 takes 1.6 times as long for either. Blackwell: what
NVIDIA/cudnn-frontend keeps of its own runs (benchmark/sdpa_benchmark_training/results, bf16, causal, April 2026, cuDNN
9.22): 64 heads of 128 take 0.514, 1.589 and 5.524 ms for two rows of 2,048, 4,096 and 8,192 tokens on a GB200, as if
1,600 tokens more stood in each; a GB300 takes 0.90 of that. Until 9.13 its runs (commits f937055 and be6c079, on a B200
and a GB300) lose as much as 3,100 tokens, and reach nine tenths of the later share.
"""

from __future__ import annotations

from typing import NamedTuple

from planner.hardware.kernels import Flash

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
    by. `narrow`: a score's time in heads of 64 over that in heads of 128, which have twice its products. `wide`: the
    time of wider heads' products."""

    share: float = 1.0
    tokens: int = 0
    narrow: float = 0.5
    wide: float = 1.0

    def times(self, flash: Flash) -> float:
        """Over the time of its products at the rate of the longest rows of heads of 128."""
        if flash.width > NARROW:
            return (self.wide if flash.width > WIDEST else 1) * (1 + self.tokens / flash.tokens)
        return 2 * (self.narrow + NARROW_ROWS * self.tokens / flash.tokens)


FLASH_2 = 1 / 1.6  # of cuDNN's rate on Hopper
# Shares are what NVIDIA's rows of 16,384 tokens to a million show, most of whose time is attention: all four of the fit
# half are met within 1% by 0.53 of peak on an H100 and, on a GB200, 0.55 and before cuDNN 9.13 nine tenths of that.
CUDNN_HOPPER = Attention(share=1.585, tokens=1900, narrow=0.65)
CUDNN_BLACKWELL = Attention(share=1.475, tokens=1600, narrow=0.8, wide=1.11)
EARLY_CUDNN_BLACKWELL = CUDNN_BLACKWELL._replace(share=0.9 * CUDNN_BLACKWELL.share, tokens=3100)
