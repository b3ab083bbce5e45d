"""`python -m MODULE ARGUMENTS`, its arithmetic done by the CPU."""

from __future__ import annotations

import runpy
import sys

from tests.stand_in.arithmetic import OnCpu

if __name__ == "__main__":
    del sys.argv[0]
    with OnCpu():
        runpy.run_module(sys.argv[0], run_name="__main__")
