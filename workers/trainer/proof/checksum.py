"""64 bits of a tensor's every bit."""

from __future__ import annotations

from functools import cache

import torch

BLOCK = 2**18  # elements at once: their words take 2 MiB as int64
FACTOR = 6364136223846793005  # odd, so that what differs before it differs after it (Knuth's MMIX)
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """(), int64: words times odd weights, modulo 2**64.

    A change of any one element always shows, of several but for one in 2**64. NaNs are bits like others.
    """
    words = tensor.detach().contiguous().flatten().view(WORDS[tensor.element_size()])
    weights = _weights(words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for block in words.split(BLOCK):
        total = total * FACTOR + (block.long() * weights[: len(block)]).sum()
    return total


@cache
def _weights(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randint(-(2**62), 2**62, (BLOCK,), generator=generator) | 1).to(device)
