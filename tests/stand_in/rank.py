"""Run `python -m MODULE ARGUMENTS` with arithmetic on the CPU."""

from __future__ import annotations

import runpy
import sys

from tests.stand_in.arithmetic import CpuDispatchMode

if __name__ == "__main__":
    del sys.argv[0]
    with CpuDispatchMode():
        runpy.run_module(sys.argv[0], run_name="__main__")
