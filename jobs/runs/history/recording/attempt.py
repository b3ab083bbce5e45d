"""One attempt being recorded: from its members' streams to its folder."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from contracts.codec import BadMessageError, salvage_batch
from contracts.telemetry.batches import Batch
from jobs.runs.history.recording.rows import Rows
from jobs.runs.history.recording.streams import Heard, Stream, order
from jobs.runs.history.store import bounds
from jobs.runs.history.store.folder import Folder, Node

log = logging.getLogger(__name__)

COMMIT_S = 5.0  # rows wait so long at most
COMMIT_BYTES = 8 * 2**20  # of batches, after which they do not wait
START = "0-0"


class Recording:
    """What was heard since the last commit is heard again where we are killed: positions move with the rows."""

    def __init__(self, root: Path, job: str, attempt: int, also: Callable[[Batch, int], None] | None = None) -> None:
        """`also` is told every batch and its node, before it is written."""
        self._also = also
        self.job, self.attempt = job, attempt
        self.folder = Folder(root, job, attempt)
        self.manifest = self.folder.open()
        self.rows = Rows(self.folder.state(self.manifest))
        self._nodes = self.manifest["nodes"]
        self._hosts: dict[int, str] = {}
        self._waiting_bytes, self._moved = 0, False
        self._committed = self._heard = time.monotonic()

    @property
    def quiet_s(self) -> float:
        """Since anything came."""
        return time.monotonic() - self._heard

    def positions(self, num_nodes: int) -> dict[Stream, Node]:
        """Of each member's stream."""
        fresh = Node(after=START, number=None, time=None)
        for node in range(num_nodes):
            self._nodes.setdefault(str(node), {**fresh})
        return {Stream(self.job, self.attempt, int(node)): where for node, where in self._nodes.items()}

    def take(self, node: int, entries: list[Heard]) -> None:
        """Rows of new entries."""
        self._heard = time.monotonic()
        for entry in entries:
            self._take(node, entry)

    def _take(self, node: int, entry: Heard) -> None:
        where = self._nodes[str(node)]
        where["after"], where["number"] = entry.id, entry.number
        self._moved = True
        batch = self._read(entry)
        if entry.missing:
            until = batch["time"] if batch is not None else order(entry.id)[0] / 1000  # Redis has the board's clock
            since = where["time"] if where["time"] is not None else until
            self.rows.mark_gap(
                node, since, until, f"{entry.missing:,} telemetry entries were deleted before the recorder read them"
            )
        if batch is None:
            return
        self.rows.add(batch, node, where["time"])
        if self._also is not None:
            self._also(batch, node)
        where["time"] = batch["time"]
        if "host" in batch:
            where["host"] = batch["host"]

    def _read(self, entry: Heard) -> Batch | None:
        """None where it makes no sense, and of one that was read before."""
        if not entry.batch:
            return None
        self._waiting_bytes += len(entry.batch)
        try:
            batch, problems = salvage_batch(entry.batch)
        except BadMessageError as error:
            self.rows.state["refused"] += 1
            log.warning("Skipped a telemetry entry of job %s, attempt %d: %s", self.job, self.attempt, error)
            return None
        self.rows.state["refused"] += len(problems)
        return batch

    def read_again(self, node: int) -> None:
        """From the start of what the stream holds now."""
        self._nodes[str(node)]["after"] = START

    @property
    def is_kept(self) -> bool:
        """Whether all that was heard is on the disk."""
        return not self._moved

    def commit_if_due(self) -> bool:
        """True when it did."""
        due = time.monotonic() - self._committed >= COMMIT_S or self._waiting_bytes >= COMMIT_BYTES
        if not (due and self._moved):
            return False
        self.commit()
        return True

    def commit(self) -> None:
        """Everything heard is on the disk then.

        Raises:
            OvertakenError, OSError: this recording is to be opened anew.
        """
        first, last = self.rows.first, self.rows.last
        known = self.manifest
        if first is not None and last is not None:
            known["first"] = first if known["first"] is None else min(first, known["first"])
            known["last"] = last if known["last"] is None else max(last, known["last"])
        self.folder.commit(known, self.rows.take(), self.rows.state)
        self._committed, self._waiting_bytes, self._moved = time.monotonic(), 0, False
        self.folder.merge_levels(known)
        bounds.keep(self.folder, known)

    def finish(self, outcome: str | None, reason: str, ended: float) -> None:
        """Nothing comes any more: one file a table."""
        if not (self.manifest["generation"] or self._moved):
            self.folder.forget()
            return
        if outcome is not None and self.manifest["ended"] is None:
            self.rows.mark("fault" if outcome == "failed" else "end", ended, text=f"{outcome}: {reason}"[:1000])
        self.manifest["ended"] = ended
        self.commit()
        self.folder.compact(self.manifest)
