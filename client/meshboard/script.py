"""Functions for a training script. They do nothing if Meshboard does not measure the script."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

METER = "meshboard_meter"  # module that Meshboard's traffic meter adds to the process of a script


def step(tokens: int | None = None, samples: int | None = None) -> AbstractContextManager[Any]:
    """Begin a training step. The step ends at the next call, or at the end of a `with` block.

    Marked steps replace the steps that Meshboard finds by itself.

    Args:
        tokens: Tokens of all ranks in this step.
        samples: Samples of all ranks in this step.
    """
    meter = sys.modules.get(METER)
    mark: AbstractContextManager[Any] = nullcontext() if meter is None else meter.step(tokens=tokens, samples=samples)
    return mark


def log(step: int, **values: Any) -> None:
    """Log metrics of this rank for a step, for example `meshboard.log(10, loss=2.1)`.

    Args:
        values: Numbers, or tensors with one element. The metric `loss` is the training loss of the run.
    """
    meter = sys.modules.get(METER)
    if meter is not None:
        meter.log(step, **values)
