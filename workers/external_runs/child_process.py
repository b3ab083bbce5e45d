"""The user's command as a child process: its output, signals, exit code, and the counters of ranks it restarts.

The output passes through unchanged, and is also written to a file that is followed for the board. The command has its
own process group, so a signal reaches it once.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

from contracts.telemetry.batches import Item
from contracts.telemetry.items import SCRIPT_SETUP_STEPS, Cell
from workers.host.rank_files import (
    LAUNCHER_STDOUT,
    RankFailure,
    clean_line,
    find_run_folder,
    get_signal_name,
    has_lost_peer,
    read_rank_error,
)
from workers.host.supervisor.exit_report import CellKey, get_cell_key

CHUNK_BYTES = 64 * 2**10
MAX_OUTPUT_WAIT_S = 5.0  # for a process that the command left behind, and that holds its pipes
MAX_LINE_BYTES = 4096  # of a line that is searched for a failure
RANK_LINE_START = re.compile(rb"\[[^\[\]\s]{0,110}\]?|")  # may become the start of such a line
RANK_LINE = re.compile(rb"\[[^\[\]\s]{1,100}\d+\]:")  # the start of a line that torchrun prints for a rank
FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# torch 2.13: "failed (exitcode: -9) local_rank: 1 (pid: 4711) of binary: /usr/bin/python3"
FIRST_FAILURE_LINE = re.compile(r"failed \(exitcode: (-?\d{1,10})\) local_rank: (\d{1,5}) \(pid: ")
Cells = dict[CellKey, Cell]
SUMMED_FIELDS = ("count", "completed", "payload_bytes", "algorithmic_bytes", "busy_s")


class OutputLog:
    """Log of one output stream, without the ranks' lines if they have separate logs.

    An incomplete line is written at once, unless it may become a line of a rank. So the log shows progress bars.
    """

    def __init__(self, path: Path, *, separate_logs: bool) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._separate_logs = separate_logs
        self._line = b""  # start of the line that is not complete
        self._num_written = 0  # bytes of this line in the log
        self.failure_line = ""  # torchrun's line about the rank that failed first, of its last restart

    def add(self, chunk: bytes) -> None:
        *ends, rest = chunk.split(b"\n")
        output = []
        for end in ends:
            output.append(self._extend_line(end + b"\n"))
            if b"failed (exitcode" in self._line and not self._is_rank_line():
                self.failure_line = self._line.decode(errors="replace")
            self._line, self._num_written = b"", 0
        output.append(self._extend_line(rest))
        if data := b"".join(output):
            _write(self._descriptor, data)

    def close(self) -> None:
        """Write the start of a line whose end does not come."""
        if not self._num_written and not self._is_rank_line():
            _write(self._descriptor, self._line)

    def _extend_line(self, text: bytes) -> bytes:
        """Return the bytes to write after more text of the line."""
        if self._num_written:
            self._line = (self._line + text)[:MAX_LINE_BYTES]
            return text
        self._line += text
        is_undecided = self._separate_logs and RANK_LINE_START.fullmatch(self._line)
        if is_undecided or self._is_rank_line():
            self._line = self._line[:MAX_LINE_BYTES]
            return b""
        written, self._num_written = self._line, len(self._line)
        return written

    def _is_rank_line(self) -> bool:
        return self._separate_logs and RANK_LINE.match(self._line) is not None


class ChildCommand:
    """A running command. Its output is appended to `log`, and standard output to a log next to it.

    Raises:
        OSError: the command cannot be started.
    """

    def __init__(self, argv: list[str], environment: dict[str, str], log: Path, *, separate_logs: bool) -> None:
        self._error_log = OutputLog(log, separate_logs=separate_logs)
        output_log = OutputLog(log.with_name(LAUNCHER_STDOUT), separate_logs=separate_logs)
        stdin = subprocess.DEVNULL if os.isatty(0) else None  # a background group that reads a terminal is stopped
        self.process = subprocess.Popen(
            argv, env=environment, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        streams = ((self.process.stdout.fileno(), 1, output_log), (self.process.stderr.fileno(), 2, self._error_log))
        self._threads = [threading.Thread(target=_copy, args=stream, daemon=True) for stream in streams]
        for thread in self._threads:
            thread.start()

    @property
    def failure_line(self) -> str:
        """Return torchrun's line about the rank that failed first, of its last restart."""
        return self._error_log.failure_line

    def wait(self) -> int:
        """Return the exit code, -N for signal N, after the output has passed."""
        code = self.process.wait()
        for thread in self._threads:
            thread.join(MAX_OUTPUT_WAIT_S)
        return code

    def send(self, number: int) -> None:
        """Send a signal to the command's process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def _copy(source: int, target: int, log: OutputLog) -> None:
    while chunk := _read(source):
        _write(target, chunk)
        log.add(chunk)
    log.close()


def parse_first_failure(line: str, logs: Path, ranks: range) -> RankFailure | None:
    """Return the rank of this node that torchrun's line names, with the error that the rank recorded."""
    match = FIRST_FAILURE_LINE.search(line)
    if match is None:
        return None
    code, local_rank = int(match[1]), int(match[2])
    if local_rank >= len(ranks) or abs(code) >= 2**31:
        return None
    run = find_run_folder(logs)
    message, time = "", None
    if run is not None:
        error = read_rank_error(logs / run / "attempt_0" / str(local_rank) / "error.json")
        message, time = clean_line(error.message), error.time
    return RankFailure(ranks[local_rank], code, get_signal_name(code), message, time, has_lost_peer(message))


def handle_signals(handle: Callable[[int], object]) -> None:
    """Call `handle` for every signal that a terminal or a batch system sends."""
    for number in FORWARDED_SIGNALS:
        signal.signal(number, lambda received, _frame: handle(received))


def get_shell_code(code: int) -> int:
    """Return an exit code as a shell does: 128 + N for signal N."""
    return 128 - code if code < 0 else code


def print_message(text: str) -> None:
    """Print a message to the user on stderr."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"meshboard-meter: {text}\n")
        sys.stderr.flush()


def _read(source: int) -> bytes:
    try:
        return os.read(source, CHUNK_BYTES)
    except OSError:
        return b""


def _write(target: int, data: bytes) -> None:
    """Write all bytes. A closed terminal or a full disk loses them without ending the command."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(target, data) :]


class CellTotals:
    """Traffic cells of one rank: `before` the last restart, and `total` including the current process."""

    def __init__(self) -> None:
        self.before: Cells = {}
        self.total: Cells = {}

    def add(self, cells: list[Cell]) -> list[Cell]:
        """Return the cells of the current process plus those before the last restart."""
        sums = [_add_cells(cell, self.before.get(get_cell_key(cell))) for cell in cells]
        self.total.update((get_cell_key(cell), cell) for cell in sums)
        return sums

    def restart(self) -> None:
        self.before = dict(self.total)


class RestartCounter:
    """Adjust the items of this node's ranks for restarts."""

    def __init__(self) -> None:
        self._traffic: dict[int, CellTotals] = {}
        self._exact: dict[int, CellTotals] = {}  # at the end of the last step
        self._steps: dict[int, tuple[int, int]] = {}  # before the last restart, and in total

    def adjust(self, item: Item) -> None:
        """Change the counters of a checked item so that they start at the first process of the rank."""
        if item["kind"] == "start" and item["stage"] == "imported":
            self._restart(item["rank"])
        elif item["kind"] == "traffic":
            item["cells"] = self._traffic.setdefault(item["rank"], CellTotals()).add(item["cells"])
        elif item["kind"] == "step":
            item["step"] = item["ran"] = self._add_steps(item["rank"], item["step"])
            item["counted"] = max(0, item["step"] - SCRIPT_SETUP_STEPS)
            exact = self._exact.setdefault(item["rank"], CellTotals())
            exact.add(item["cells"])
            item["cells"] = list(exact.total.values())
        elif item["kind"] == "phase" and "steps" in item:
            item["steps"] = self._add_steps(item["rank"], item["steps"])
            if "cells" in item:
                exact = self._exact.setdefault(item["rank"], CellTotals())
                exact.add(item["cells"])
                item["cells"] = list(exact.total.values())

    def _add_steps(self, rank: int, steps: int) -> int:
        """Return the steps of all processes of a rank. The set-up steps of a restarted process repeat steps."""
        before, _ = self._steps.get(rank, (0, 0))
        total = before + max(steps, SCRIPT_SETUP_STEPS if before else 0)
        self._steps[rank] = before, total
        return total

    def _restart(self, rank: int) -> None:
        for totals in (self._traffic, self._exact):
            if rank in totals:
                totals[rank].restart()
        _, steps = self._steps.get(rank, (0, 0))
        self._steps[rank] = (max(0, steps - SCRIPT_SETUP_STEPS),) * 2


def _add_cells(cell: Cell, before: Cell | None) -> Cell:
    if before is None:
        return cell
    sums = {name: cell[name] + before[name] for name in SUMMED_FIELDS}  # type: ignore[literal-required]
    return cast(Cell, cell | sums)
