"""Python client and command line of a Meshboard board. Needs neither Django nor torch.

A training script imports this package only for `step` and `log`, so the client is loaded at its first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from meshboard.script import log, step

if TYPE_CHECKING:
    from meshboard.client import Client, Job
    from meshboard.errors import AwayError, RefusedError, TimedOutError, WrongError

__all__ = ["AwayError", "Client", "Job", "RefusedError", "TimedOutError", "WrongError", "log", "step"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "meshboard.client" if name in ("Client", "Job") else "meshboard.errors"
    return getattr(importlib.import_module(module), name)
