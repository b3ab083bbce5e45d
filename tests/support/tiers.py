"""Divide the cases of a parametrized test between the default and the extended tier."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def extend_after(count: int, cases: Iterable[Any]) -> list[Any]:
    """Run the first `count` cases by default, and the others only in the extended tier."""
    listed = [case if type(case) is tuple else (case,) for case in cases]
    extended = [pytest.param(*case, marks=pytest.mark.extended) for case in listed[count:]]
    return [*(pytest.param(*case) for case in listed[:count]), *extended]
