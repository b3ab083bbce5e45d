"""`python -m workers.slurm`: one node of an attempt that Slurm runs. srun starts it on each, its order on stdin.

No rank starts before the board has this node's claim: of an attempt that was submitted twice one is refused there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import tempfile
from pathlib import Path

from contracts.codec import BadMessageError
from contracts.control import END_WARNING_SUFFIX, AllocationOrder, get_node_index
from workers.elsewhere.joining import Asked, Joining, RefusedError, Run
from workers.host.attempts import SOCKET_FOLDER, AttemptDir, socket_root
from workers.host.settings import HostSettings
from workers.host.start.claims import claim
from workers.host.supervisor.__main__ import Supervisor
from workers.host.supervisor.ending import saved_words
from workers.host.supervisor.line import GangLine
from workers.host.supervisor.line.https import BadUrlError, Board
from workers.host.supervisor.line.over_http import HttpLine
from workers.slurm.node import Node, NoNodeError, launch_order, read_order, settings_of, this_node, why_ended
from workers.slurm.prune import prune


class Allocated(Supervisor):
    """A supervisor that Slurm may end, and that does not know why it does; it has the run save first."""

    def __init__(self, attempt: AttemptDir, settings: HostSettings, folder: Path, line: GangLine, node: Node) -> None:
        super().__init__(attempt, settings, folder, line)
        self._slurm_job = node.slurm_job
        self._warned = settings.run_dir.parents[1] / f"{node.slurm_job}.{END_WARNING_SUFFIX}"

    def _shut_down(self) -> None:
        """Slurm's SIGTERM: it is cancelled, preempted, or its time is over. SIGKILL follows KillWait later, or when the
        GraceTime is over: what takes longer to save is lost.
        """
        if self._over.is_set():  # how it ended stands
            return
        if not (self.settings.saves_on_term and self.tally.training):
            self._end("lost", "Slurm ended it")
        elif not self._save_first:
            self._ask_to_save()

    async def _see_cancel(self) -> None:
        """The board need not answer for a run to save when Slurm ends it."""
        if not self._save_first and self._warned.exists():
            self._ask_to_save()
        await super()._see_cancel()

    async def _report(self) -> None:
        with contextlib.suppress(OSError):  # one that writes nothing for a week is in use all the same: see `prune`
            os.utime(self.attempt.own)
        await super()._report()

    async def _tell_of_stop(self) -> None:
        if get_node_index(self.order) != 0:
            return
        told = await asyncio.to_thread(why_ended, self._slurm_job)
        self.preempted = told == "preempted"
        if self.preempted:
            why = "because Slurm preempted the job"
        elif told == "time limit" or self._warned.exists():
            why = "because the Slurm time limit is near"
        else:
            why = "because Slurm requested it"
        self.ended_by = "cancelled" if self.preempted else "failed"
        self.reason = f"{saved_words(self.tally, why)}; a retry resumes from it"


def say(words: str) -> None:
    """To the batch job's output, which the board shows of an attempt that could not tell more."""
    print(f"meshboard: {words}", file=sys.stderr, flush=True)


async def supervise(order: AllocationOrder, node: Node, settings: HostSettings, board: Board) -> int:
    """From the claim to the last word; 0 when all went well."""
    run = Run(order["job"], order["attempt"], order["token"], "")
    try:
        who = await Joining(board, Asked(run, "", {}), say).join(run, node.place, node.name)
    except RefusedError as error:
        say(f"The board refused this attempt: {error}")
        return 1
    attempt = claim(settings.run_dir, launch_order(order, node))
    if attempt is None:
        say("This attempt was already started on this node.")
        return 1
    folder = socket_root() / f"{SOCKET_FOLDER}{secrets.token_hex(6)}"
    outcome = await Allocated(attempt, settings, folder, HttpLine(board, who, say), node).run()
    return 0 if outcome == "succeeded" else 1


def main() -> int:
    try:
        order = read_order(sys.stdin.buffer)
        node = this_node(order)
        board = _board(order)
    except (BadMessageError, NoNodeError, BadUrlError, OSError) as error:
        say(str(error))
        return 1
    code = asyncio.run(supervise(order, node, settings_of(order, node), board))
    if node.place == 0:
        prune(Path(order["folder"]))
    return code


def _board(order: AllocationOrder) -> Board:
    """Raises BadUrlError, OSError."""
    if not order["certificates"]:
        return Board(order["board"])
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(order["certificates"])
        file.flush()
        return Board(order["board"], Path(file.name))


if __name__ == "__main__":
    sys.exit(main())
