"""What takes too long ends whole, and tells where it stood."""

from __future__ import annotations

import os
import sys

import pytest

from tests.support.processes import gone
from tests.support.ranks import run_to_end

LAUNCHER = """
import subprocess, sys
rank = "import signal\\ndef stuck_here():\\n    signal.pause()\\nstuck_here()"
print(subprocess.Popen([sys.executable, "-c", rank], start_new_session=True).pid, flush=True)
subprocess.Popen([sys.executable, "-c", rank], start_new_session=True).wait()
"""


def test_what_hangs_tells_every_stack_and_leaves_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHBOARD_PATIENCE", "1")
    with pytest.raises(AssertionError, match=r"longer than 5 s") as told:
        run_to_end([sys.executable, "-c", LAUNCHER], os.environ, limit_s=5)
    assert str(told.value).count("in stuck_here") == 2
    first = next(line for line in str(told.value).splitlines() if line.isdigit())
    assert gone(int(first))
