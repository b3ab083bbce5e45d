"""Run three gloo ranks that stall in different ways: `python -m tests.workers.meter.stuck RANK PORT SOCKET`."""

from __future__ import annotations

import ctypes
import sys
import time

import torch
import torch.distributed as dist

from workers.meter import Exporter, Recorder, register_metered_backend


def enters_alone() -> None:
    """Enter a collective that no other rank enters."""
    dist.all_reduce(torch.ones(250))


def sleeps_elsewhere() -> None:
    time.sleep(600)


def holds_the_interpreter() -> None:
    """Hold the GIL, as a C extension may."""
    ctypes.PyDLL(None).sleep(600)


def main() -> None:
    rank, port, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    recorder = Recorder(rank)
    Exporter(recorder, path, "stuck", 1)
    backend = register_metered_backend(recorder, "cpu")
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    recorder.set_phase("step")
    recorder.begin_step(1)
    dist.all_reduce(torch.ones(250))
    time.sleep(0.5)  # let the exporter send the last items
    (enters_alone, sleeps_elsewhere, holds_the_interpreter)[rank]()


if __name__ == "__main__":
    main()
