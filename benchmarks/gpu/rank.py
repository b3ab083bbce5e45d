"""What every part's program does: read its arguments, write what it found, and end in time."""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu.results import Found, write
from benchmarks.gpu.sharing import own_gpu
from workers.meter import Recorder, register_metered_backend


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--limit", type=float, required=True, help="seconds after which this process ends itself")
    return parser


def begin(options: argparse.Namespace) -> torch.device:
    """The device of this rank. A rank whose parent was killed does not outlive its time."""
    faulthandler.dump_traceback_later(options.limit, exit=True, file=sys.stderr)
    if options.device == "cpu":
        torch.set_num_threads(1)
        return torch.device("cpu")
    return own_gpu(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


def meet(device: torch.device) -> Recorder:
    """This rank's meter, on the default group."""
    recorder = Recorder(int(os.environ["RANK"]))
    dist.init_process_group(register_metered_backend(recorder, device.type))
    return recorder


def wait(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def tell(out: Path, found: Found) -> None:
    write(out, found)


def nothing_found() -> Found:
    return Found(measured={}, beside={}, wrong=[], notes=[])
