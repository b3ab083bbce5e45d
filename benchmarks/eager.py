"""Measure the time that the host needs for a layer in eager torch, with tensors too small to matter.

    python -m benchmarks.eager

The time per kernel of `planner.hardware.kernels` is `planner.hardware.cluster.DEFAULT_LAUNCH_S`.
"""

from __future__ import annotations

import time

import torch

from planner.facts.parse_spec import parse_fields
from planner.facts.spec import JobSpec
from planner.hardware.cluster import DEFAULT_LAUNCH_S
from planner.hardware.kernels import build_layer_kernels
from workers.trainer.model import Block, Strategy

TOKENS = 8
CALLS = 20
ROUNDS = 30


def measure_layer_s(spec: JobSpec) -> float:
    """Return the shortest mean time of forward and backward of one layer."""
    block = Block(spec.model, Strategy(attention=spec.train.attention))
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(1, TOKENS, spec.model.hidden_size, requires_grad=True)

    def calls() -> float:
        started = time.perf_counter()
        for _ in range(CALLS):
            block(x).sum().backward()
            block.zero_grad(set_to_none=True)
        return (time.perf_counter() - started) / CALLS

    calls()
    return min(calls() for _ in range(ROUNDS))


def main() -> None:
    torch.set_num_threads(1)
    for preset in ("gpt-tiny", "llama-tiny"):
        for attention in ("fused", "unfused"):
            train = {"seq_len": TOKENS, "global_batch": 1, "attention": attention}
            spec = parse_fields({"model": {"preset": preset}, "train": train})
            work = build_layer_kernels(spec)
            count = len(work.forward) + len(work.backward_input) + len(work.backward_weight)
            seconds = measure_layer_s(spec)
            each = seconds / count
            layer = f"{seconds * 1e3:>6.2f} ms per layer, {count} kernels"
            ratio = f"{each / DEFAULT_LAUNCH_S:.2f} of the planned time"
            print(f"{preset:<12}{attention:<9}{layer}: {each * 1e6:.0f} us per kernel, {ratio}")


if __name__ == "__main__":
    main()
