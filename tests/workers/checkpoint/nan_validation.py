"""Run a rank whose validation loss is NaN."""

from __future__ import annotations

import math

from tests.workers.checkpoint.rank import main as main
from workers.trainer.trainer import Trainer

Trainer.evaluate = lambda _self: math.nan  # type: ignore[method-assign]
