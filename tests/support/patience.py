"""How long tests wait before they call a thing missing.

A wait ends as soon as what it waits for is there, so patience costs a test that passes nothing, and on a machine that
has other work it is what keeps a slow answer from being called a wrong one. Promises in seconds are held to the second
where nothing else runs: `make slow`, `make faults` and `make cluster` set MESHBOARD_PATIENCE=1.
"""

from __future__ import annotations

import os

TIMES = "6"


def patient(seconds: float) -> float:
    """So long to wait for what takes `seconds` at most on two cores with nothing beside."""
    return seconds * float(os.environ.get("MESHBOARD_PATIENCE", TIMES))
