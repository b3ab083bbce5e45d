"""Run a tiny all-reduce periodically, and write its end time to a file, for `benchmarks.latency`."""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist

from contracts.telemetry.items import PhaseItem
from workers.meter import Exporter, Recorder, register_metered_backend
from workers.meter.rank_exit import run_and_exit

TICKS = 200
WARM_UP_S = 6.0


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("--spec", "--data-root", "--job", "--telemetry"):
        parser.add_argument(name)
    parser.add_argument("--attempt", type=int)
    options, _ = parser.parse_known_args()  # ignore other options of trainers
    rank = int(os.environ["RANK"])
    recorder = Recorder(rank)
    exporter = Exporter(recorder, options.telemetry, options.job, options.attempt)
    dist.init_process_group(register_metered_backend(recorder, "cpu"))
    recorder.set_phase("step")
    exporter.send(PhaseItem(kind="phase", rank=rank, time=time.time(), phase="step"))
    time.sleep(WARM_UP_S)  # the browser opens the page
    pause = random.Random(0)
    with Path(f"ticks-{rank}").open("w", buffering=1) as ends:
        for tick in range(1, TICKS + 1):
            dist.all_reduce(torch.ones(1024))
            ends.write(f"{tick} {time.time()}\n")
            time.sleep(pause.uniform(0.05, 0.25))
    time.sleep(2)
    dist.destroy_process_group()
    exporter.close()
    return 0


if __name__ == "__main__":
    run_and_exit(main)
