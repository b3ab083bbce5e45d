"""Colors with a meaning: a run on the page Compare never has the color of an axis or of a part of a step."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import combinations, product
from operator import mul
from pathlib import Path

import pytest

TOKENS = Path(__file__).parents[2] / "webapp" / "static" / "css" / "tokens.css"
MIN_DISTANCE = 0.1  # in OKLab
MIN_CONTRAST = 4.5  # of text, by WCAG 2

TO_CONES = ((0.4122, 0.5363, 0.0514), (0.2119, 0.6807, 0.1074), (0.0883, 0.2817, 0.6300))
TO_LAB = ((0.2105, 0.7936, -0.0041), (1.9780, -2.4286, 0.4506), (0.0259, 0.7828, -0.8087))


def tokens(theme: int) -> dict[str, str]:
    """Return the colors of the light theme (0) or the dark theme (1) by token."""
    found = re.finditer(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", TOKENS.read_text())
    return {match[1]: match[2 + theme] for match in found}


def linear(color: str) -> list[float]:
    shares = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]


def dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(map(mul, one, other))


def oklab(color: str) -> list[float]:
    cones = [math.cbrt(dot(row, linear(color))) for row in TO_CONES]
    return [dot(row, cones) for row in TO_LAB]


def contrast(one: str, other: str) -> float:
    light = sorted(dot((0.2126, 0.7152, 0.0722), linear(color)) + 0.05 for color in (one, other))
    return light[1] / light[0]


@pytest.mark.parametrize("theme", [0, 1])
def test_runs_axes_and_parts_of_a_step_have_different_colors(theme: int) -> None:
    colors = tokens(theme)
    runs = [name for name in colors if name.startswith("run-")]
    others = [name for name in colors if name.startswith(("axis-", "part-"))]
    assert (len(runs), len(others)) == (6, 14)
    pairs = [*combinations(runs, 2), *product(runs, others)]
    near = [(a, b) for a, b in pairs if math.dist(oklab(colors[a]), oklab(colors[b])) < MIN_DISTANCE]
    assert near == []
    faint = [name for name in runs if contrast(colors[name], colors["surface"]) < MIN_CONTRAST]
    assert faint == [], "letters of runs are text"
