"""One rank of the parity runs: every case of one world size in turn, in the same processes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from planner.parse import parse_spec
from planner.spec import JobSpec
from workers.meter import Recorder, metered_backend
from workers.trainer.data import corpus_of
from workers.trainer.loop import Trainer, train
from workers.trainer.mesh import make_mesh
from workers.trainer.parallelize import parallelize


def make_trainer(spec: JobSpec, data_root: Path, recorder: Recorder) -> Trainer:
    mesh = make_mesh(spec, recorder.rank, recorder.label)
    device = torch.device("cpu")
    corpus = corpus_of(spec, data_root)
    return Trainer(spec, mesh, parallelize(spec, mesh, device), corpus, recorder, device)


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """This rank's part of every gradient of step 1."""
    trainer.backward(0)
    return {held.name: held.gradient.clone() for held in trainer.part.tensors}


def run_case(spec: JobSpec, rank: int, data_root: Path, folder: Path) -> None:
    """Gradients of step 1 from one trainer, then a whole metered run from a fresh one."""
    store = dist.FileStore(str(folder / "store"), spec.layout.world_size)
    world = spec.layout.world_size
    dist.init_process_group("gloo", store=dist.PrefixStore("gradients", store), rank=rank, world_size=world)
    try:
        torch.save(gradients(make_trainer(spec, data_root, Recorder(rank))), folder / f"gradients-{rank}.pt")
    finally:
        dist.destroy_process_group()
    recorder = Recorder(rank)
    backend = metered_backend(recorder, "cpu")
    dist.init_process_group(backend, store=dist.PrefixStore("run", store), rank=rank, world_size=world)
    try:
        said: list[dict[str, object]] = []
        train(make_trainer(spec, data_root, recorder), lambda item: said.append(dict(item)), lambda _line: None)
        (folder / f"said-{rank}.json").write_text(json.dumps({"items": said, "cells": recorder.cells()}))
    finally:
        dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    out, data_root = Path(sys.argv[1]), Path(sys.argv[2])
    for entry in json.loads((out / "cases.json").read_text()):
        folder = out / entry["folder"]
        run_case(parse_spec(entry["spec"]), int(os.environ["RANK"]), data_root, folder)


if __name__ == "__main__":
    main()
