"""What a training job does with checkpoints: go on from one, save, and say so."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from contracts.telemetry.batches import Item
from contracts.telemetry.steps import CheckpointItem
from planner.facts.spec import JobSpec
from workers.checkpoint import folder, transfer
from workers.checkpoint.borrow import borrow
from workers.checkpoint.coordination import on_every_rank, on_first_rank
from workers.checkpoint.folder import Checkpoint, Place
from workers.checkpoint.load import restore
from workers.checkpoint.save import Saved, Saver
from workers.trainer.trainer import Trainer


class JobCheckpoints:
    """One rank's side of it. `group` is one that nothing else uses: saving goes on beside training."""

    def __init__(
        self,
        spec: JobSpec,
        trainer: Trainer,
        place: Place,
        group: dist.ProcessGroup | None,
        send: Callable[[Item], None],
        say: Callable[[str], None],
    ) -> None:
        self._spec, self._trainer, self._place, self._group = spec, trainer, place, group
        self._rank, self._send = trainer.mesh.rank, send
        self._say = say if self._rank == 0 else lambda _line: None
        attempt = place.root / place.job / str(place.attempt)
        self._saver = Saver(spec, trainer.mesh.place, self._rank, attempt, group, self._told, place.host)
        trainer.copies = self._saver.copies
        self._candidates: list[Checkpoint] = []
        self._done = 0

    def resume(self) -> int:
        """Go on from the newest checkpoint of this job, else from the one asked for. Gives the steps done.

        Raises:
            UserError: an earlier attempt told of one, and no host of this one has it: nothing is begun anew in silence.
        """
        trouble = self._borrow()
        damaged = transfer.bring(self._place.root / self._place.job, self._group, self._spec.train.keep_checkpoints)
        for attempt, step in damaged:
            self._say(f"checkpoint {attempt}/step-{step:08d} is damaged. Trying the previous checkpoint.")
        # All ranks try the same ones, whatever comes and goes on disk, each below its own host's root.
        names = on_first_rank(lambda: self._names(trouble, damaged), self._group)
        if not names:
            return 0
        self._candidates = [Checkpoint(self._place.root / name, step) for name, step in names]
        trainer, where = self._trainer, self._trainer.mesh.place
        own = self._candidates[0].path.is_relative_to(self._place.root / self._place.job)
        self._done = restore(
            self._spec,
            where,
            trainer.part,
            trainer.optimizer,
            self._candidates,
            self._group,
            self._say,
            least_left=0 if own else 1,  # an attempt may have ended between its last step and its end
        )
        return self._done

    def restored(self, one: Trainer) -> None:
        """Fill a trainer of the whole model, on rank 0 alone, from the checkpoint that this job went on from.

        Raises:
            UserError: it is gone, or whole no more.
        """
        same = [checkpoint for checkpoint in self._candidates if checkpoint.step == self._done]
        quiet: Callable[[str], None] = lambda _line: None  # noqa: E731
        with torch.random.fork_rng(devices=[]):
            restore(one.spec, one.mesh.place, one.part, one.optimizer, same, None, quiet)

    def save(self, step: int) -> None:
        self._saver.save(step, self._trainer.part, self._trainer.optimizer)

    def close(self) -> None:
        """Wait for what is still being written."""
        self._saver.close()

    def _borrow(self) -> str:
        """What an earlier attempt told of and no host of this one has, to rank 0's host; "" or what went wrong."""
        place = self._place
        if not place.expected:
            return ""
        job, least = place.root / place.job, folder.number(place.expected)
        seen = on_every_rank(lambda: (transfer.numbers_of(job)[-1:], place.loan is not None), self._group)
        if not seen[0][1] or any(newest >= least for have, _ in seen for newest in have):
            return ""
        came = borrow(job, place.loan, least, self._group, self._spec.train.keep_checkpoints)
        if not came.problem:
            rate = f"{came.num_bytes / 1e6:,.1f} MB in {came.took_s:.2f} s"
            self._say(f"checkpoint {place.job}/{came.name}: {rate} from host {place.expected_on}")
        return came.problem

    def _names(self, trouble: str, damaged: list[folder.Number]) -> list[tuple[str, int]]:
        """Each below the root, and its steps."""
        root = self._place.root
        bases = [
            (one, root if one.path.is_relative_to(root) else root.resolve()) for one in self._found(trouble, damaged)
        ]
        return [(one.name(base), one.step) for one, base in bases]

    def _found(self, trouble: str, damaged: list[folder.Number]) -> list[Checkpoint]:
        own = folder.complete_below(self._place.root / self._place.job)[::-1]
        expected = self._place.expected
        there = expected and own and any(number >= folder.number(expected) for number in damaged)
        if expected and not there:
            folder.must_have(own, self._place.expected, self._place.expected_on, trouble)
        if own or self._spec.train.resume is None:
            return own
        return folder.candidates(self._place.root, self._spec.train.resume)

    def _told(self, saved: Saved) -> None:
        if self._rank != 0:
            return
        name = None if saved.path is None else str(saved.path.relative_to(self._place.root))
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
            self._say(f"Cannot write the checkpoint after step {saved.step}: {saved.problem}.{then}")
            return
        took = f"{saved.num_bytes / 1e6:,.1f} MB in {saved.save_s:.2f} s, training stalled {saved.stall_s * 1e3:.1f} ms"
        self._say(f"checkpoint {name}: {took}")
