"""Load, save, and report the checkpoints of a training job."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from contracts.telemetry.batches import Item
from contracts.telemetry.steps import CheckpointItem
from workers.checkpoint import folder, transfer
from workers.checkpoint.borrow import borrow
from workers.checkpoint.coordination import run_on_every_rank, run_on_first_rank
from workers.checkpoint.folder import Checkpoint, CheckpointLocation
from workers.checkpoint.load import restore
from workers.checkpoint.save import Saver, SaveResult
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
        """Load the checkpoint of this run into a trainer of the whole model, on rank 0.

        Raises:
            UserError: if the checkpoint is deleted or damaged.
        """
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
