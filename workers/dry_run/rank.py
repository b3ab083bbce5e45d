"""One training step of one rank, dry."""

from __future__ import annotations

import gc
import math
import time
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist

from contracts.telemetry.results import MemoryParts
from contracts.telemetry.steps import Cell
from planner.facts.spec import JobSpec
from workers.dry_run.watch import Watch
from workers.meter.dry import dry_world
from workers.meter.recorder import Recorder
from workers.torch_private.fsdp import storage_changes
from workers.torch_private.tensors import FakeTensorMode
from workers.trainer.dataset import Corpus, Tokens
from workers.trainer.memory import Standing, storage_bytes
from workers.trainer.parallel.mesh import make_mesh
from workers.trainer.parallel.parallelize import assemble, build, local
from workers.trainer.trainer import Trainer

SOON = 50  # objects: what only a cycle holds goes at once, whatever ran here before; else it may lie in the peak


class DryStep(NamedTuple):
    """What one rank does in one optimiser step. `cells` are the meter's, `received_rows` what came to its experts.

    `peak_bytes` is of tensors alive at once beside Adam's moments, which are `optimizer_bytes`; `memory` has both, part
    by part.
    """

    rank: int
    cells: list[Cell]
    received_rows: int
    parameters: int
    peak_bytes: int
    optimizer_bytes: int
    memory: MemoryParts
    flops: int
    seconds: float


class Blank:
    """A corpus of zeros."""

    def train_batch(self, seed: int, step: int, global_batch: int, rows: slice, seq_len: int) -> Tokens:
        return np.zeros((rows.stop - rows.start, seq_len + 1), dtype=np.int64)


def dry_step(spec: JobSpec, rank: int) -> DryStep:
    """A step of `rank` that is not its first, with no weight allocated and nothing sent. Kernels are a CPU's; what they
    keep for backward is what a GPU's keep.

    All of the trainer's own code but the draw of initial values and the router's choice, taken to be even. One process
    runs one at a time.
    """
    started = time.perf_counter()
    usual = gc.get_threshold()
    gc.collect()
    gc.set_threshold(SOON)
    recorder, device = Recorder(rank), torch.device("cpu")
    dry_world(recorder, rank, spec.layout.world_size, spec.resources.device)
    try:
        mesh = make_mesh(spec, rank, recorder.label)
        built = build(spec, mesh, device, fill=False, even=True)
        watch = Watch()
        with FakeTensorMode(allow_non_fake_inputs=True), watch, storage_changes(watch.resized):
            for decoder in built.chunks.values():
                decoder.to_empty(device=device)
            part = assemble(spec, mesh, built)
            trainer = Trainer(spec, mesh, part, cast(Corpus, Blank()), recorder, device)
            moments = _moments(trainer)
            trainer.standing = standing = Standing(part, trainer.optimizer, watch, trainer.copies)
            recorder.set_phase("step")
            trainer.backward(0)
            standing.complete()
            trainer.reduce_statistics()
            trainer.update(0, math.inf)
            memory = standing.told()
        cells = recorder.cells("step")
        rows = trainer.received_rows()
    finally:
        gc.set_threshold(*usual)
        dist.destroy_process_group()
    seconds = time.perf_counter() - started
    held = sum(local(p).numel() for p in part.masters())
    return DryStep(rank, cells, rows, held, watch.read() - moments, moments, memory, watch.flops, seconds)


def _moments(trainer: Trainer) -> int:
    """Let the optimiser make what a first update makes of each weight; bytes."""
    for master in trainer.part.masters():
        master.grad = torch.zeros_like(master)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    state = trainer.optimizer.state
    return storage_bytes(local(value) for kept in state.values() for value in kept.values() if value.ndim)
