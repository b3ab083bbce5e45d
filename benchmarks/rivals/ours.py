"""Our side: the trainer's own loop, metered, on a spec read from a file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.rivals.turns import Turns
from contracts.telemetry.batches import Item
from planner.facts.parse_spec import parse_fields
from workers.meter import Recorder, register_metered_backend
from workers.trainer.allocator import forget_shapes, return_large_tensors, reuse_what_is_freed
from workers.trainer.dataset import corpus_of
from workers.trainer.parallel.mesh import make_mesh
from workers.trainer.parallel.parallelize import parallelize
from workers.trainer.trainer import Trainer, train


def main() -> None:
    spec = parse_fields(json.loads(Path(sys.argv[1]).read_text()))
    torch.set_num_threads(1)
    return_large_tensors()
    reuse_what_is_freed()
    forget_shapes()
    recorder, device = Recorder(int(os.environ["RANK"])), torch.device("cpu")
    dist.init_process_group(register_metered_backend(recorder, "cpu"))
    mesh = make_mesh(spec, recorder.rank, recorder.label_group)
    part = parallelize(spec, mesh, device)
    trainer = Trainer(spec, mesh, part, corpus_of(spec, Path(sys.argv[2])), recorder, device)
    turns = Turns()

    def send(item: Item) -> None:
        first = item["kind"] == "phase" and item["phase"] == "step"
        if (first or item["kind"] == "step") and not turns.step():
            sys.stdout.flush()
            os._exit(0)

    train(trainer, send, print)


if __name__ == "__main__":
    main()
