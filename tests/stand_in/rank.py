"""`python -m workers.trainer`, its arithmetic done by the CPU."""

from __future__ import annotations

import runpy

from tests.stand_in.arithmetic import OnCpu

if __name__ == "__main__":
    with OnCpu():
        runpy.run_module("workers.trainer", run_name="__main__")
