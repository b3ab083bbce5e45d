"""Compare how the traffic of data, tensor, and pipeline parallelism grows.

Bytes of one optimizer step: parameters 12 l h^2 (2104.04473 equation 2 without small terms), one batch of b sequences
of s tokens, groups of n ranks, and stages of k layers. Bytes are ring-optimal and per sending rank. For the pipeline
they are the sum over all stage boundaries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple, TypedDict

from planner.facts.validation import Problem, SpecError

ELEMENT_BYTES = 2
POINTS = 41
CLASSIC = "TP > DP > PP"


class Setting(NamedTuple):
    """Setting of the comparison.

    b sequences, s tokens per sequence, hidden size h, l layers, k layers per stage, n ranks per dp or tp group.
    """

    b: int = 8
    s: int = 2048
    h: int = 4096
    l: int = 32  # noqa: E741  # the letter the field writes
    k: int = 8
    n: int = 8

    @property
    def stages(self) -> int:
        return -(-self.l // self.k)


RANGES = {"b": (1, 4096), "s": (64, 131072), "h": (128, 65536), "l": (1, 1024), "k": (1, 1024), "n": (2, 65536)}


class Volume(TypedDict):
    """Bytes that one axis sends, with order, formula, numbers, and source."""

    axis: str
    name: str
    num_bytes: float
    order: str
    formula: str
    numbers: str
    source: str


class Lesson(TypedDict):
    """Volumes at a setting in descending order, and whether TP > DP > PP holds.

    `tp_equals_dp_tokens` and `dp_equals_pp_tokens` are the tokens at which two axes send equal bytes.
    """

    setting: dict[str, int]
    volumes: list[Volume]
    tp_equals_dp_tokens: float
    dp_equals_pp_tokens: float | None
    tokens: int
    order: str
    classic: bool
    verdict: str


def parse_setting(values: dict[str, object]) -> Setting:
    """Parse untrusted values into a setting.

    Raises:
        SpecError: With every value that is unknown or out of range.
    """
    found = [
        Problem(str(name)[:20], f"`{str(name)[:20]}` is unknown. Use {', '.join(RANGES)}.")
        for name in values
        if name not in RANGES
    ]
    good: dict[str, int] = {}
    for name, (least, most) in RANGES.items():
        value = values.get(name, Setting._field_defaults[name])
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            found.append(Problem(name, f"`{name}` is out of range. Use a whole number from {least} to {most}."))
        else:
            good[name] = value
    if not found and good["k"] > good["l"]:
        found.append(
            Problem("k", f"`k` is {good['k']}, but the model has {good['l']} layers. Use at most {good['l']}.")
        )
    if found:
        raise SpecError(found)
    return Setting(**good)


def compute_data_bytes(x: Setting) -> float:
    """Return the bytes to all-reduce gradients: 2 (n - 1)/n P (2104.04473 section 3.2).

    ZeRO-1 sends the same bytes, and ZeRO-2 does with one micro-batch.
    """
    return 2 * (x.n - 1) / x.n * 12 * x.l * x.h**2 * ELEMENT_BYTES


def compute_zero3_bytes(x: Setting) -> float:
    """Return the bytes of ZeRO-3: 3 (n - 1)/n P (1910.02054 section 7).

    It gathers parameters twice and reduce-scatters gradients once.
    """
    return 1.5 * compute_data_bytes(x)


def compute_tensor_bytes(x: Setting) -> float:
    """Return the bytes of four all-reduces per layer: 8 b s h (n - 1)/n elements.

    Source: 2104.04473 section 3.2.
    """
    return 8 * x.b * x.s * x.h * x.l * (x.n - 1) / x.n * ELEMENT_BYTES


def compute_pipeline_bytes(x: Setting) -> float:
    """Return the bytes of hidden states and gradients over all stage boundaries.

    There are 2 (l/k - 1) b s h elements. The last stage can have fewer than k layers.
    """
    return 2 * (x.stages - 1) * x.b * x.s * x.h * ELEMENT_BYTES


def compare_axes(x: Setting) -> Lesson:
    """Return volumes, order, and verdict of a setting."""
    share = f"{x.n - 1}/{x.n}"
    volumes = [
        Volume(
            axis="dp",
            name="data parallel, ZeRO-1, ZeRO-2",
            num_bytes=compute_data_bytes(x),
            order="O(h² l)",
            formula="2 (n-1)/n · 12 l h² · 2 B",
            numbers=f"2 · {share} · 12 · {x.l} · {x.h}² · 2 B",
            source="Megatron 2104.04473 section 3.2; ZeRO 1910.02054 section 7",
        ),
        Volume(
            axis="zero3",
            name="ZeRO-3",
            num_bytes=compute_zero3_bytes(x),
            order="O(h² l)",
            formula="3 (n-1)/n · 12 l h² · 2 B",
            numbers=f"3 · {share} · 12 · {x.l} · {x.h}² · 2 B",
            source="ZeRO 1910.02054 section 7.2.2",
        ),
        Volume(
            axis="tp",
            name="tensor parallel",
            num_bytes=compute_tensor_bytes(x),
            order="O(b s h l)",
            formula="8 (n-1)/n · b s h l · 2 B",
            numbers=f"8 · {share} · {x.b} · {x.s} · {x.h} · {x.l} · 2 B",
            source="Megatron 2104.04473 section 3.2",
        ),
        Volume(
            axis="pp",
            name="pipeline parallel, all boundaries",
            num_bytes=compute_pipeline_bytes(x),
            order="O(b s h l / k)",
            formula="2 (⌈l/k⌉ - 1) · b s h · 2 B",
            numbers=f"2 · ({x.stages} - 1) · {x.b} · {x.s} · {x.h} · 2 B",
            source="Megatron 2104.04473 section 3.2",
        ),
    ]
    sizes = {"TP": compute_tensor_bytes(x), "DP": compute_data_bytes(x), "PP": compute_pipeline_bytes(x)}
    several = sorted(sizes, key=lambda axis: -sizes[axis])
    order = several[0] + "".join(
        f" {'=' if math.isclose(sizes[more], sizes[less]) else '>'} {less}" for more, less in pairwise(several)
    )
    return Lesson(
        setting=x._asdict(),
        volumes=sorted(volumes, key=lambda volume: -volume["num_bytes"]),
        tp_equals_dp_tokens=get_tp_dp_tokens(x),
        dp_equals_pp_tokens=get_dp_pp_tokens(x),
        tokens=x.b * x.s,
        order=order,
        classic=order == CLASSIC,
        verdict=_verdict(x),
    )


def get_tp_dp_tokens(x: Setting) -> float:
    """Return the tokens at which tp sends as many bytes as dp.

    8 b s h l = 24 l h^2, so b s = 3 h.
    """
    return 3.0 * x.h


def get_dp_pp_tokens(x: Setting) -> float | None:
    """Return the tokens at which the pipeline sends as many bytes as dp, or None.

    A single stage sends no bytes.
    """
    if x.stages == 1:
        return None
    return 12 * x.l * x.h * (x.n - 1) / x.n / (x.stages - 1)


def _verdict(x: Setting) -> str:
    tokens, low, high = x.b * x.s, get_tp_dp_tokens(x), get_dp_pp_tokens(x)
    if tokens == low:
        return f"TP = DP: b s = {tokens:,} tokens equals 3 h, so TP and DP send the same bytes."
    if high is not None and math.isclose(tokens, high):
        return f"DP = PP: b s = {tokens:,} tokens equals 12 l h (n-1)/n / boundaries, so DP and PP send the same bytes."
    if tokens < low:
        return (
            f"TP > DP does not hold: b s = {tokens:,} tokens is below 3 h = {low:,.0f}, so DP sends more bytes than TP."
        )
    if high is not None and tokens >= high:
        return f"DP > PP does not hold: b s = {tokens:,} tokens is above {high:,.0f}, so PP sends more bytes than DP."
    upper = "" if high is None else f" and below {high:,.0f}"
    return f"TP > DP > PP holds: b s = {tokens:,} tokens is above 3 h = {low:,.0f}{upper}."


class Curves(TypedDict):
    """Bytes of each axis over one variable, on an evenly spaced logarithmic scale."""

    variable: str
    x: list[float]
    series: dict[str, list[float | None]]


_LINES: dict[str, Callable[[Setting], float]] = {
    "dp": compute_data_bytes,
    "zero3": compute_zero3_bytes,
    "tp": compute_tensor_bytes,
    "pp": compute_pipeline_bytes,
}


def compute_curves(x: Setting, variable: str) -> Curves:
    """Return the bytes of each axis over one variable.

    Raises:
        SpecError: If the variable is unknown.
    """
    if variable not in RANGES:
        raise SpecError([Problem("over", f"`over` is {variable[:60]!r}. Use one of {', '.join(RANGES)}.")])
    least, most = RANGES[variable]
    if variable == "k":
        most = x.l
    if variable == "l":
        least = x.k
    steps = POINTS - 1
    grid = {round(least * (most / least) ** (i / steps)) for i in range(POINTS)}
    values = sorted(grid | {getattr(x, variable)})
    settings = [x._replace(**{variable: value}) for value in values]
    series = {axis: [line(setting) or None for setting in settings] for axis, line in _LINES.items()}
    return Curves(variable=variable, x=[float(value) for value in values], series=series)
