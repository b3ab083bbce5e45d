"""Modules that begin first. One that takes minutes would run alone at the end, beside processes that have no more; and
dry runs take longer the more a process keeps of the tests before them, which each collection of garbage looks through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

EARLY = (
    "tests/workers/trainer/parallel/test_device_order.py",
    "tests/memory/test_memory.py",
    "tests/workers/test_dry_run.py",
    "tests/memory/test_experts.py",
    "tests/workers/trainer/parallel/test_decides.py",
    "tests/workers/trainer/model/test_activations.py",
    "tests/workers/trainer/parallel/test_context.py",
)


def early_first(tests: Sequence[tuple[str, T]], early: Sequence[str] = EARLY) -> list[T]:
    """Of tests by their ids those of early modules, module by module, then the others as they came."""
    place = {module: number for number, module in enumerate(early)}
    return [test for _, test in sorted(tests, key=lambda one: place.get(one[0].split("::")[0], len(early)))]
