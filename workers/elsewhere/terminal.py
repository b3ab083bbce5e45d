"""The command as its user would have started it: its words on the terminal, the terminal's signals to it, its code.

Its words pass through us untouched, on their way to a file that is followed for the board. It is in a process group of
its own, so that a signal reaches it once, from us.
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

CHUNK = 64 * 2**10
LAST_WORDS_S = 5.0  # for what the command left behind and still holds its pipes
TEED = re.compile(rb"\[[^\[\]\s]{1,100}\d+\]:")  # how torchrun begins a line that a rank said
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class Command:
    """`argv` running, its own words also appended to `log`; with `apart` those that ranks said are not."""

    def __init__(self, argv: list[str], environment: dict[str, str], log: Path, *, apart: bool) -> None:
        """Raises OSError: it cannot be started."""
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._apart = apart
        self.failure = ""  # torchrun's line on the rank that failed first, of its last try
        stdin = subprocess.DEVNULL if os.isatty(0) else None  # from another group, reading a terminal would stop it
        self.process = subprocess.Popen(
            argv, env=environment, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        pairs = ((self.process.stdout.fileno(), 1), (self.process.stderr.fileno(), 2))
        self._pumps = [threading.Thread(target=self._pump, args=pair, daemon=True) for pair in pairs]
        for pump in self._pumps:
            pump.start()

    def wait(self) -> int:
        """Its exit code, -N of signal N, once what it said has passed."""
        code = self.process.wait()
        for pump in self._pumps:
            pump.join(LAST_WORDS_S)
        return code

    def send(self, number: int) -> None:
        """A signal to the command and what is in its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _pump(self, source: int, target: int) -> None:
        rest = b""
        while chunk := _read(source):
            _write(target, chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            self._note(lines)
            if len(rest) > CHUNK:
                self._note([rest])
                rest = b""
        if rest:
            self._note([rest])

    def _note(self, lines: list[bytes]) -> None:
        kept = [line for line in lines if not (self._apart and TEED.match(line))]
        if told := [line for line in kept if b"failed (exitcode" in line]:
            self.failure = told[-1].decode(errors="replace")
        if kept:
            _write(self._log, b"\n".join(kept) + b"\n")


def on_signals(hear: Callable[[int], None]) -> None:
    """Every signal that a terminal or a batch system sends goes to `hear`."""
    for number in PASSED_ON:
        signal.signal(number, lambda told, _frame: hear(told))


def shell_code(code: int) -> int:
    """As a shell tells it: 128 + N of signal N."""
    return 128 - code if code < 0 else code


def say(words: str) -> None:
    """To the user, on stderr."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"meshboard-meter: {words}\n")
        sys.stderr.flush()


def _read(source: int) -> bytes:
    try:
        return os.read(source, CHUNK)
    except OSError:
        return b""


def _write(target: int, data: bytes) -> None:
    """A terminal that is gone and a disk that is full lose the words, and end nobody."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(target, data) :]
