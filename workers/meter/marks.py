"""The module `meshboard_meter`, through which a script marks its steps and logs metrics.

`meshboard.step` and `meshboard.log` of the client look for this module and do nothing without it. On a host without the
client, the module also takes the name `meshboard`, so a script can always import it.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import AbstractContextManager
from numbers import Integral
from types import ModuleType, TracebackType
from typing import Any

from workers.meter.script_steps import StepTracker
from workers.metric_values import MetricCollector

MODULE_NAME = "meshboard_meter"
CLIENT_NAME = "meshboard"
MAX_PER_STEP = 2**53
MAX_WARNINGS = 20


class StepMark(AbstractContextManager[None]):
    """End a marked step at the end of a `with` block."""

    def __init__(self, tracker: StepTracker) -> None:
        self._tracker = tracker

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._tracker.end_explicit()
        else:
            self._tracker.abandon_explicit()


def register_marks(tracker: StepTracker, metrics: MetricCollector | None = None) -> ModuleType:
    """Let the script of this process mark its steps, and log metrics."""
    mark, warned = StepMark(tracker), set[str]()

    def warn(name: str, value: object, expected: str) -> None:
        if name not in warned and len(warned) < MAX_WARNINGS:
            warned.add(name)
            received = str(value)[:60] if isinstance(value, str | int | float) else type(value).__name__
            text = f"{name} is {received!r}, and is ignored. Use {expected}."
            print(f"meshboard: {text}", file=sys.stderr)

    def read_count(name: str, value: object) -> int | None:
        if value is None or (isinstance(value, Integral) and 0 <= int(value) <= MAX_PER_STEP):
            return None if value is None else int(value)
        warn(name, value, "a whole number from 0")
        return None

    def step(tokens: int | None = None, samples: int | None = None) -> StepMark:
        """Begin a step of this rank. The step ends at the next call, or at the end of a `with` block.

        Args:
            tokens: Tokens of all ranks in this step.
            samples: Samples of all ranks in this step.
        """
        counts = read_count("`tokens` of a step", tokens), read_count("`samples` of a step", samples)
        tracker.begin_explicit(tokens=counts[0], samples=counts[1])
        return mark

    def log(step: int, **values: Any) -> None:
        """Log metrics of this rank for a step.

        Args:
            values: Numbers, or tensors with one element.
        """
        number = read_count("The step of `meshboard.log`", step)
        if number is None:
            return
        if metrics is not None:
            for name in metrics.add("meshboard.log", number, values)[:MAX_WARNINGS]:
                warn(f"`{name[:60]}` of `meshboard.log`", values.get(name), "a number, or a tensor with one element")

    module = ModuleType(MODULE_NAME, __doc__)
    module.step, module.log = step, log  # type: ignore[attr-defined]
    sys.modules[MODULE_NAME] = module
    return module


def provide_client(module: ModuleType) -> None:
    """Let the script import `meshboard` on a host without the client. `sys.path` is that of the script."""
    if CLIENT_NAME not in sys.modules and importlib.util.find_spec(CLIENT_NAME) is None:
        sys.modules[CLIENT_NAME] = module
