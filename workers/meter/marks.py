"""The module `meshboard_meter`, through which a script marks its steps.

`meshboard.step` of the client looks for this module and does nothing without it. On a host without the client, the
module also takes the name `meshboard`, so a script can always import it.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import AbstractContextManager
from numbers import Integral
from types import ModuleType, TracebackType

from workers.meter.script_steps import StepTracker

MODULE_NAME = "meshboard_meter"
CLIENT_NAME = "meshboard"
MAX_PER_STEP = 2**53


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


def register_marks(tracker: StepTracker) -> ModuleType:
    """Let the script of this process mark its steps."""
    mark, warned = StepMark(tracker), set[str]()

    def read_count(name: str, value: object) -> int | None:
        if value is None or (isinstance(value, Integral) and 0 <= int(value) <= MAX_PER_STEP):
            return None if value is None else int(value)
        if name not in warned:
            warned.add(name)
            text = f"`{name}` of a step is {str(value)[:60]!r}, and is ignored. Use a whole number from 0."
            print(f"meshboard: {text}", file=sys.stderr)
        return None

    def step(tokens: int | None = None, samples: int | None = None) -> StepMark:
        """Begin a step of this rank. The step ends at the next call, or at the end of a `with` block.

        Args:
            tokens: Tokens of all ranks in this step.
            samples: Samples of all ranks in this step.
        """
        tracker.begin_explicit(tokens=read_count("tokens", tokens), samples=read_count("samples", samples))
        return mark

    module = ModuleType(MODULE_NAME, __doc__)
    module.step = step  # type: ignore[attr-defined]
    sys.modules[MODULE_NAME] = module
    return module


def provide_client(module: ModuleType) -> None:
    """Let the script import `meshboard` on a host without the client. `sys.path` is that of the script."""
    if CLIENT_NAME not in sys.modules and importlib.util.find_spec(CLIENT_NAME) is None:
        sys.modules[CLIENT_NAME] = module
