"""Load, save, and report the checkpoints of a training job.

Saves are asynchronous: training waits only for a copy of its state.
"""

from __future__ import annotations

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

from contracts.telemetry.batches import Item
from contracts.telemetry.items import CheckpointItem
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
from workers.checkpoint.folder import Checkpoint, CheckpointLocation, Files
from workers.checkpoint.load import restore
from workers.checkpoint.state import (
    BoxedState,
    BoxedTensor,
    BoxSavePlanner,
    compute_tensor_checksums,
    get_model_state,
    get_optimizer_state,
)
from workers.checkpoint.transfer import borrow
from workers.disk import discard_path
from workers.trainer.errors import UserError
from workers.trainer.parallel.parallelize import ModelShard
from workers.trainer.trainer import Trainer


class CheckpointManager:
    """Manage the checkpoints of one rank. Only checkpoints use `group`, because saves overlap with training."""

    def __init__(
        self,
        trainer: Trainer,
        location: CheckpointLocation,
        group: dist.ProcessGroup | None,
        send: Callable[[Item], None],
        log: Callable[[str], None],
    ) -> None:
        self._spec, self._trainer, self._location, self._group = trainer.spec, trainer, location, group
        self._rank, self._send = trainer.mesh.rank, send
        self._log = log if self._rank == 0 else lambda _line: None
        attempt = location.root / location.job / str(location.attempt)
        self._saver = Saver(
            trainer.spec, trainer.mesh.coordinates, self._rank, attempt, group, self._report, location.host
        )
        trainer.get_staged_tensors = self._saver.get_staged_tensors
        self._candidates: list[Checkpoint] = []
        self._steps_done = 0

    def load(self) -> int:
        """Load the newest checkpoint of this job, or the checkpoint of `train.resume`. Return its steps.

        Raises:
            UserError: if an earlier attempt reported a checkpoint that no host of this attempt has.
        """
        problem = self._borrow_if_missing()
        damaged = transfer.distribute(
            self._location.root / self._location.job, self._group, self._spec.train.keep_checkpoints
        )
        for attempt, step in damaged:
            self._log(f"checkpoint {attempt}/step-{step:08d} is damaged. Trying the previous checkpoint.")
        # All ranks try the same checkpoints, each below the root of its host.
        names = run_on_first_rank(lambda: self._list_names(problem, damaged), self._group)
        if not names:
            return 0
        self._candidates = [Checkpoint(self._location.root / name, step) for name, step in names]
        trainer = self._trainer
        own = self._candidates[0].path.is_relative_to(self._location.root / self._location.job)
        self._steps_done = restore(
            self._spec,
            trainer.mesh.coordinates,
            trainer.model,
            trainer.optimizer,
            self._candidates,
            self._group,
            self._log,
            min_steps_left=0 if own else 1,  # An attempt can fail after its last step.
        )
        return self._steps_done

    def load_into(self, trainer: Trainer) -> None:
        """Load the checkpoint of this run into a trainer of the whole model, on rank 0. Raises UserError."""
        same = [checkpoint for checkpoint in self._candidates if checkpoint.step == self._steps_done]
        quiet: Callable[[str], None] = lambda _line: None  # noqa: E731
        with torch.random.fork_rng(devices=[]):
            restore(trainer.spec, trainer.mesh.coordinates, trainer.model, trainer.optimizer, same, None, quiet)

    def save(self, step: int) -> None:
        self._saver.save(step, self._trainer.model, self._trainer.optimizer)

    def close(self) -> None:
        """Wait for a running save."""
        self._saver.close()

    def _borrow_if_missing(self) -> str:
        """Copy the expected checkpoint to rank 0's host if no host of this attempt has it.

        Returns the problem, or an empty text.
        """
        location = self._location
        if not location.expected:
            return ""
        job, min_id = location.root / location.job, folder.parse_checkpoint_id(location.expected)
        states = run_on_every_rank(
            lambda: (transfer.list_checkpoint_ids(job)[-1:], location.loan is not None), self._group
        )
        if not states[0][1] or any(newest >= min_id for have, _ in states for newest in have):
            return ""
        result = borrow(job, location.loan, min_id, self._group, self._spec.train.keep_checkpoints)
        if not result.problem:
            rate = f"{result.num_bytes / 1e6:,.1f} MB in {result.took_s:.2f} s"
            self._log(f"checkpoint {location.job}/{result.name}: {rate} from host {location.expected_host}")
        return result.problem

    def _list_names(self, problem: str, damaged: list[folder.CheckpointId]) -> list[tuple[str, int]]:
        """Return (name below the root, steps) of each checkpoint."""
        root = self._location.root
        names = []
        for checkpoint in self._list_own(problem, damaged):
            base = root if checkpoint.path.is_relative_to(root) else root.resolve()
            names.append((checkpoint.get_name(base), checkpoint.step))
        return names

    def _list_own(self, problem: str, damaged: list[folder.CheckpointId]) -> list[Checkpoint]:
        own = folder.list_complete(self._location.root / self._location.job)[::-1]
        expected = self._location.expected
        is_damaged = expected and own and any(number >= folder.parse_checkpoint_id(expected) for number in damaged)
        if expected and not is_damaged:
            folder.require_expected(own, self._location.expected, self._location.expected_host, problem)
        if own or self._spec.train.resume is None:
            return own
        return folder.list_candidates(self._location.root, self._spec.train.resume)

    def _report(self, saved: SaveResult) -> None:
        if self._rank != 0:
            return
        name = None if saved.path is None else str(saved.path.relative_to(self._location.root))
        item = CheckpointItem(
            kind="checkpoint",
            rank=0,
            time=time.time(),
            step=saved.step,
            name=name,
            num_bytes=saved.num_bytes,
            stall_s=saved.stall_s,
            save_s=saved.save_s,
            problem=saved.problem,
        )
        self._send(item)
        if name is None:
            then = " Training continues." if saved.step < self._spec.train.steps else ""
            self._log(f"Cannot write the checkpoint after step {saved.step}: {saved.problem}.{then}")
            return
        took = f"{saved.num_bytes / 1e6:,.1f} MB in {saved.save_s:.2f} s, training stalled {saved.stall_s * 1e3:.1f} ms"
        self._log(f"checkpoint {name}: {took}")


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
        """Allocate the copies for all saves. Raises UserError."""
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

        def describe_own_files() -> Files:
            own = [path.name for path in draft.glob(f"__{self._rank}_*")]
            with report_disk_full(self._host, draft):
                return folder.describe_files(draft, own + [".metadata"] * (self._rank == 0))

        def publish() -> None:
            with report_disk_full(self._host, draft):
                published = folder.publish(draft, self._spec, step, files, rng, sums)
            folder.retain_newest(self._attempt, self._spec.train.keep_checkpoints, published)

        described = run_on_every_rank(describe_own_files, self._group)
        files = {name: entry for rank_files in described for name, entry in rank_files.items()}
        transfer.collect_files(draft, files, self._group)
        sums = compute_tensor_checksums(self._staged, self._spec.model, self._group)
        run_on_first_rank(publish, self._group)
        transfer.discard_draft(draft)
        return sum(size for size, _ in files.values())

    def _create_draft(self, draft: Path) -> None:
        with report_disk_full(self._host, draft):
            _create_draft(draft)


def _allocate_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Allocate a copy in pinned memory for a GPU tensor, or in ordinary memory if that fails."""
    if tensor.is_cuda:
        with suppress(RuntimeError):
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _create_draft(draft: Path) -> None:
    discard_path(draft)
    draft.mkdir(parents=True)
