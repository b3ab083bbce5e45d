"""Run the metered loop of the trainer with a spec from a file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.rivals.turn_taking import Turns
from contracts.telemetry.batches import Item
from planner.facts.parse_spec import parse_fields
from workers.meter import Recorder, register_metered_backend
from workers.trainer.dataset import load_job_dataset
from workers.trainer.memory import configure_large_allocations, limit_primitive_cache, use_single_heap
from workers.trainer.parallel.mesh import build_mesh
from workers.trainer.trainer import RunHooks, Trainer


def main() -> None:
    spec = parse_fields(json.loads(Path(sys.argv[1]).read_text()))
    torch.set_num_threads(1)
    configure_large_allocations()
    use_single_heap()
    limit_primitive_cache()
    recorder, device = Recorder(int(os.environ["RANK"])), torch.device("cpu")
    dist.init_process_group(register_metered_backend(recorder, "cpu"))
    mesh = build_mesh(spec, recorder.rank, recorder.label_group)
    trainer = Trainer.build(spec, mesh, load_job_dataset(spec, Path(sys.argv[2])), recorder, device)
    turns = Turns()

    def send(item: Item) -> None:
        first = item["kind"] == "phase" and item["phase"] == "step"
        if (first or item["kind"] == "step") and not turns.step():
            sys.stdout.flush()
            os._exit(0)

    trainer.train(RunHooks(send, print))


if __name__ == "__main__":
    main()
