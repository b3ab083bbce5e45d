"""A rank that trains well, and whose validation loss is no number."""

from __future__ import annotations

import math
import os
import sys

from tests.workers.checkpoint.rank import main
from workers.trainer.loop import Trainer

if __name__ == "__main__":
    Trainer.evaluate = lambda _self: math.nan  # type: ignore[method-assign]
    code = main()
    sys.stdout.flush()
    os._exit(code)
