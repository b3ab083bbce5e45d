"""Saving while training goes on: a step only waits for a copy of its state."""

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
from workers.checkpoint.coordination import Writer, on_every_rank, on_first_rank, told_of, words_of
from workers.checkpoint.manifest import Files
from workers.checkpoint.state import Boxed, BoxSavePlanner, State, model_state, optimizer_state
from workers.checkpoint.tensor_checksums import Sums, sums_of
from workers.trainer.errors import UserError
from workers.trainer.parallel.parallelize import Part


class Saved(NamedTuple):
    """A checkpoint that is complete, or why there is none. `stall_s` is what training waited."""

    step: int
    path: Path | None
    num_bytes: int
    stall_s: float
    save_s: float
    problem: str


class Saver:
    """Saves one rank's part; all ranks save at the same steps. `group` is one that nothing else uses."""

    def __init__(
        self,
        spec: JobSpec,
        place: Coordinates,
        rank: int,
        attempt: Path,
        group: dist.ProcessGroup | None,
        told: Callable[[Saved], None],
        host: str = "",
    ) -> None:
        self._spec, self._place, self._rank, self._attempt, self._group = spec, place, rank, attempt, group
        self._told, self._host = told, host or socket.gethostname()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None
        self._copies: State = {}

    def save(self, step: int, part: Part, optimizer: torch.optim.Optimizer) -> None:
        """Copy the state and return; the rest happens beside training. Waits for a save that still runs."""
        started = time.perf_counter()
        self.wait()
        state = model_state(self._spec, self._place, part) | optimizer_state(self._spec, self._place, part, optimizer)
        try:
            self._make_room(state)
        except UserError as error:  # as when it cannot be written: training goes on
            self._copies.clear()
            self._told(Saved(step, None, 0, time.perf_counter() - started, 0.0, str(error)))
            return
        for name, boxed in state.items():
            self._copies[name].tensor.copy_(boxed.tensor)
        stall_s = time.perf_counter() - started
        self._running = self._thread.submit(self._write, step, torch.get_rng_state().tolist(), stall_s)

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._running is not None:
            self._running.result()
            self._running = None

    def copies(self) -> list[torch.Tensor]:
        """What a save copies to, and the next one too."""
        return [boxed.tensor for boxed in self._copies.values()]

    def close(self) -> None:
        self.wait()
        self._thread.shutdown()

    def _make_room(self, state: State) -> None:
        """For the copies of this save and of those that follow.

        Raises:
            UserError: on all ranks, where there is none on one.
        """
        if self._copies:
            return

        def make() -> None:
            for name, boxed in state.items():
                self._copies[name] = Boxed(_room_for(boxed.tensor), boxed.box, boxed.whole)

        on_every_rank(make, self._group)

    def _write(self, step: int, rng: list[int], stall_s: float) -> None:
        started = time.perf_counter()
        target = folder.step_folder(self._attempt, step)
        draft = folder.draft_of(target)
        path, num_bytes, problem = None, 0, ""
        try:
            num_bytes = self._write_all(step, rng, draft)
            path = target
        except (CheckpointException, Exception) as error:  # must not end the training that a checkpoint is to protect
            problem = words_of(error)
            transfer.discard(draft)
        self._told(Saved(step, path, num_bytes, stall_s, time.perf_counter() - started, problem))

    def _write_all(self, step: int, rng: list[int], draft: Path) -> int:
        on_first_rank(lambda: self._empty(draft), self._group)
        planner, alone = BoxSavePlanner(), self._group is None
        # Its own collectives carry what fails in it to all ranks.
        writer = Writer(draft, self._rank, self._host)
        dcp_save(self._copies, storage_writer=writer, planner=planner, process_group=self._group, no_dist=alone)
        described = on_every_rank(lambda: self._own_files(draft), self._group)
        files = {name: entry for part in described for name, entry in part.items()}
        transfer.collect(draft, files, self._group)
        sums = sums_of(self._copies, self._spec.model, self._group)
        on_first_rank(lambda: self._publish(draft, step, files, rng, sums), self._group)
        transfer.discard(draft)
        return sum(size for size, _ in files.values())

    def _empty(self, draft: Path) -> None:
        with told_of(self._host, draft):
            _empty(draft)

    def _own_files(self, draft: Path) -> Files:
        own = [path.name for path in draft.glob(f"__{self._rank}_*")]
        with told_of(self._host, draft):
            return folder.describe(draft, own + [".metadata"] * (self._rank == 0))

    def _publish(self, draft: Path, step: int, files: Files, rng: list[int], sums: Sums) -> None:
        with told_of(self._host, draft):
            published = folder.publish(draft, self._spec, step, files, rng, sums)
        folder.retain(self._attempt, self._spec.train.keep_checkpoints, published)


def _room_for(tensor: torch.Tensor) -> torch.Tensor:
    """In memory that a GPU copies to fastest, where the host lends as much of that. Raises RuntimeError."""
    if tensor.is_cuda:
        with suppress(RuntimeError):
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _empty(draft: Path) -> None:
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
