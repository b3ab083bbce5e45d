"""Run all parity cases of one world size on one rank, in the same process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from planner.facts.parse_spec import parse_spec
from planner.facts.spec import JobSpec
from workers.meter import Recorder, register_metered_backend
from workers.trainer.dataset import load_job_dataset
from workers.trainer.errors import VerificationError
from workers.trainer.memory import PeakMemory
from workers.trainer.parallel.expert_parallel import ExchangePlan, ExpertParallel
from workers.trainer.parallel.mesh import build_mesh
from workers.trainer.trainer import RunHooks, Trainer
from workers.trainer.verification import RunVerifier


def make_trainer(spec: JobSpec, data_root: Path, recorder: Recorder) -> Trainer:
    mesh = build_mesh(spec, recorder.rank, recorder.label_group)
    device = torch.device("cpu")
    corpus = load_job_dataset(spec, data_root)
    return Trainer.build(spec, mesh, corpus, recorder, device)


class KeptGradients(RunVerifier):
    """Verification of the run, which also keeps this rank's shard of each gradient of the first step."""

    kept: dict[str, torch.Tensor]

    def check_gradients(self, index: int) -> None:
        super().check_gradients(index)
        if index == 0:
            self.kept = {held.name: held.gradient.clone() for held in self.trainer.model.parameters}


@contextmanager
def routed_rows(recorder: Recorder) -> Iterator[list[int]]:
    """Record the rows that routers send to experts of other ranks, for each call in steps."""
    found: list[int] = []
    plan = ExpertParallel.plan

    def look(ep: ExpertParallel, counts: torch.Tensor, rows: int) -> ExchangePlan:
        planned = plan(ep, counts, rows)
        if recorder.phase == "step":
            of_rank = counts.unflatten(0, (ep.degree, -1)).sum(1)
            found.append(int(of_rank.sum() - of_rank[ep.index]))
        return planned

    with mock.patch.object(ExpertParallel, "plan", look):
        yield found


def run_case(spec: JobSpec, rank: int, data_root: Path, folder: Path) -> None:
    """Run a metered job, and return the gradients of its first step."""
    store, recorder = dist.FileStore(str(folder / "store"), spec.layout.world_size), Recorder(rank)
    backend = register_metered_backend(recorder, "cpu")
    dist.init_process_group(backend, store=store, rank=rank, world_size=spec.layout.world_size)
    try:
        output: list[dict[str, object]] = []
        trainer = make_trainer(spec, data_root, recorder)
        watch = KeptGradients(trainer, lambda item: output.append(dict(item)), lambda _line: None)
        with routed_rows(recorder) as routed, suppress(VerificationError):  # the failure is in the output
            send, peak = lambda item: output.append(dict(item)), PeakMemory(trainer.device)
            trainer.train(RunHooks(send, lambda _line: None, verifier=watch, peak=peak))
        torch.save(watch.kept, folder / f"gradients-{rank}.pt")
        found = {
            "items": output,
            "cells": recorder.get_cells(),
            "routed_rows": sum(routed),
            "failure": watch.failure,
        }
        (folder / f"said-{rank}.json").write_text(json.dumps(found))
    finally:
        dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    out, data_root = Path(sys.argv[1]), Path(sys.argv[2])
    for entry in json.loads((out / "cases.json").read_text()):
        folder = out / entry["folder"]
        run_case(parse_spec(entry["spec"]), int(os.environ["RANK"]), data_root, folder)
