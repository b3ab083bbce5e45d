"""Where a step's time goes on the device: kernels by what they are for, from torch.profiler's trace."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

# The first that matches a kernel's name. Inductor's kernels are fused from passes over memory.
KINDS = (
    ("sends", r"nccl"),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("products", r"gemm|cutlass|nvjet|xmma|cublas"),
    ("optimizer", r"multi_tensor|adam"),
    ("passes, compiled", r"triton"),
)
COPIES, OTHERS, ANY = "copies", "passes", "any"
LARGEST = 8


def kind_of(event: Mapping[str, Any]) -> str:
    if str(event.get("cat", "")).startswith("gpu_mem"):
        return COPIES
    return next((kind for kind, words in KINDS if re.search(words, event["name"], re.IGNORECASE)), OTHERS)


def _told(kind: str) -> str:
    return f"kernels of one more step, {kind}, ms"


def shares(events: Iterable[Mapping[str, Any]]) -> tuple[dict[str, float], list[str]]:
    """(ms by kind, with the time in which any ran, and what took longest) of a trace's events; of a CPU's nothing."""
    by_kind: defaultdict[str, float] = defaultdict(float)
    by_name: defaultdict[str, float] = defaultdict(float)
    spans = []
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        by_kind[_told(kind_of(event))] += event["dur"] / 1e3
        by_name[event["name"]] += event["dur"] / 1e3
        spans.append((event["ts"], event["ts"] + event["dur"]))
    if spans:
        by_kind[_told(ANY)] = _covered(spans) / 1e3
    longest = sorted(by_name, key=by_name.__getitem__, reverse=True)[:LARGEST]
    return dict(by_kind), [f"{by_name[name]:.1f} ms {name[:90]}" for name in longest]


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    covered, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
