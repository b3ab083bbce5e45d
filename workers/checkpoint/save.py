"""Save checkpoints asynchronously: training waits only for a copy of its state."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from planner.facts.layout import Coordinates
from planner.facts.spec import JobSpec
from workers.checkpoint import folder, transfer
from workers.checkpoint.coordination import (
    CheckpointWriter,
    format_error,
    report_disk_full,
    run_on_every_rank,
    run_on_first_rank,
)
from workers.checkpoint.manifest import Files
from workers.checkpoint.state import BoxedState, BoxedTensor, BoxSavePlanner, get_model_state, get_optimizer_state
from workers.checkpoint.tensor_checksums import Sums, compute_tensor_checksums
from workers.trainer.errors import UserError
from workers.trainer.parallel.parallelize import ModelShard


class SaveResult(NamedTuple):
    """Store a completed checkpoint, or the problem. `stall_s` is the time that training waited."""

    step: int
    path: Path | None
    num_bytes: int
    stall_s: float
    save_s: float
    problem: str


class Saver:
    """Save one rank's shards. All ranks save at the same steps, over a group that nothing else uses."""

    def __init__(
        self,
        spec: JobSpec,
        coordinates: Coordinates,
        rank: int,
        attempt: Path,
        group: dist.ProcessGroup | None,
        on_saved: Callable[[SaveResult], None],
        host: str = "",
    ) -> None:
        self._spec, self._coordinates, self._rank, self._attempt, self._group = spec, coordinates, rank, attempt, group
        self._on_saved, self._host = on_saved, host or socket.gethostname()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None
        self._staged: BoxedState = {}

    def save(self, step: int, model: ModelShard, optimizer: torch.optim.Optimizer) -> None:
        """Copy the state, and write it in a thread. A running save finishes first."""
        started = time.perf_counter()
        self.wait()
        state = get_model_state(self._spec, self._coordinates, model) | get_optimizer_state(
            self._spec, self._coordinates, model, optimizer
        )
        try:
            self._allocate_copies(state)
        except UserError as error:  # Training continues, as after a failed write.
            self._staged.clear()
            self._on_saved(SaveResult(step, None, 0, time.perf_counter() - started, 0.0, str(error)))
            return
        for name, boxed in state.items():
            self._staged[name].tensor.copy_(boxed.tensor)
        stall_s = time.perf_counter() - started
        self._running = self._thread.submit(self._write, step, torch.get_rng_state().tolist(), stall_s)

    def wait(self) -> None:
        """Wait for a running save."""
        if self._running is not None:
            self._running.result()
            self._running = None

    def get_staged_tensors(self) -> list[torch.Tensor]:
        """Return the copies of the state, which all saves reuse."""
        return [boxed.tensor for boxed in self._staged.values()]

    def close(self) -> None:
        self.wait()
        self._thread.shutdown()

    def _allocate_copies(self, state: BoxedState) -> None:
        """Allocate the copies for all saves.

        Raises:
            UserError: on all ranks, if one rank has not enough memory.
        """
        if self._staged:
            return

        def make() -> None:
            for name, boxed in state.items():
                self._staged[name] = BoxedTensor(_allocate_copy(boxed.tensor), boxed.box, boxed.whole)

        run_on_every_rank(make, self._group)

    def _write(self, step: int, rng: list[int], stall_s: float) -> None:
        started = time.perf_counter()
        target = folder.get_step_folder(self._attempt, step)
        draft = folder.get_draft_path(target)
        path, num_bytes, problem = None, 0, ""
        try:
            num_bytes = self._write_all(step, rng, draft)
            path = target
        except (CheckpointException, Exception) as error:  # A failed save must not end the training.
            problem = format_error(error)
            transfer.discard_draft(draft)
        self._on_saved(SaveResult(step, path, num_bytes, stall_s, time.perf_counter() - started, problem))

    def _write_all(self, step: int, rng: list[int], draft: Path) -> int:
        run_on_first_rank(lambda: self._create_draft(draft), self._group)
        planner, alone = BoxSavePlanner(), self._group is None
        # `dcp_save` reports its errors to all ranks.
        writer = CheckpointWriter(draft, self._rank, self._host)
        dcp_save(self._staged, storage_writer=writer, planner=planner, process_group=self._group, no_dist=alone)
        described = run_on_every_rank(lambda: self._own_files(draft), self._group)
        files = {name: entry for rank_files in described for name, entry in rank_files.items()}
        transfer.collect_files(draft, files, self._group)
        sums = compute_tensor_checksums(self._staged, self._spec.model, self._group)
        run_on_first_rank(lambda: self._publish(draft, step, files, rng, sums), self._group)
        transfer.discard_draft(draft)
        return sum(size for size, _ in files.values())

    def _create_draft(self, draft: Path) -> None:
        with report_disk_full(self._host, draft):
            _create_draft(draft)

    def _own_files(self, draft: Path) -> Files:
        own = [path.name for path in draft.glob(f"__{self._rank}_*")]
        with report_disk_full(self._host, draft):
            return folder.describe_files(draft, own + [".metadata"] * (self._rank == 0))

    def _publish(self, draft: Path, step: int, files: Files, rng: list[int], sums: Sums) -> None:
        with report_disk_full(self._host, draft):
            published = folder.publish(draft, self._spec, step, files, rng, sums)
        folder.retain_newest(self._attempt, self._spec.train.keep_checkpoints, published)


def _allocate_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Allocate a copy in pinned memory for a GPU tensor, or in ordinary memory if that fails."""
    if tensor.is_cuda:
        with suppress(RuntimeError):
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _create_draft(draft: Path) -> None:
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
