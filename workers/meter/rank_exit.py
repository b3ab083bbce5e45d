"""How a rank ends: what it died of is told, and no thread of a broken group is waited for.

Told where torchrun tells a rank to (TORCHELASTIC_ERROR_FILE), in the shape of torch's own handler, within bounds and
with a time that says which of several ranks was the first. `workers.host.start.launch` reads it.

What a rank prints goes to a file, whose disk may be full: then lines are lost, and no rank dies of it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import io
import json
import os
import signal
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from typing_extensions import Buffer

from workers.disk import DISK_FULL_ERRNOS

MAX_MESSAGE = 2_000  # characters
MAX_TRACEBACK = 16_000


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Run a rank's program and end the process with its exit code, of -N by signal N.

    A plain exit would wait for gloo's threads of a broken group.
    """
    faulthandler.enable()
    tolerate_full_disk()
    code = _code_of(main)
    _write_what_is_left()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def finish_interpreter() -> None:
    """What Python does when its main program is over: idle threads of pools are sent home, others are waited for, and
    what is registered for the end is called."""
    with contextlib.suppress(KeyboardInterrupt):  # who is tired of waiting
        threading._shutdown()  # type: ignore[attr-defined]  # only this does it in Python's own order
    atexit._run_exitfuncs()


def _write_what_is_left() -> None:
    """To files that were not closed: Python writes it as it takes itself down, and we do not."""
    for file in gc.get_objects():
        if issubclass(type(file), io.IOBase):
            with contextlib.suppress(Exception):  # it is closed, or somebody's own
                if stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # another thread may wait in a pipe for ever
                    file.flush()
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):
            stream.flush()  # type: ignore[union-attr]
    ctypes.CDLL(None).fflush(None)


def fail(message: str, code: int) -> int:
    """Say in one line what is wrong, here and to torchrun. Gives `code`."""
    sys.stderr.write(f"error: {message}\n")  # one write: lines of ranks that share a pipe would mix
    sys.stderr.flush()
    report_error(message)
    return code


def report_error(message: str, trace: str = "") -> None:
    """Leave word of what this rank dies of. The last word counts."""
    path, now = os.environ.get("TORCHELASTIC_ERROR_FILE"), time.time()
    if not path:
        return
    extra = {"py_callstack": trace[-MAX_TRACEBACK:], "timestamp": str(int(now)), "time_s": now}
    try:
        Path(path).write_text(json.dumps({"message": {"message": message[:MAX_MESSAGE], "extraInfo": extra}}))
    except OSError as error:  # a full disk must not hide what was to be told: it is in the log
        sys.stderr.write(f"error: cannot write {path!r}: {error.strerror or error}\n")


def report_exception(error: BaseException) -> None:
    """Leave word of an exception that nobody caught."""
    # Of a syntax error, the place comes first, indented.
    words = next(line for line in traceback.format_exception_only(error) if not line.startswith(" "))
    report_error(words.strip(), "".join(traceback.format_exception(error)))


def _code_of(main: Callable[[], int]) -> int:
    try:
        return main()
    except Exception as error:
        report_exception(error)
        sys.excepthook(*sys.exc_info())
        return 1


class DiskFullTolerantWriter(io.RawIOBase):
    """A descriptor to write to. What a full disk does not take is counted, and told where it takes some again."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor, self._lost = descriptor, 0
        self.name = f"<{name}>"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Buffer, /) -> int:
        told = bytes(data)
        if (
            self._lost
            and self._put(f"\n[{self._lost:,} bytes of output are missing: the disk was full]\n".encode()) == 0
        ):
            self._lost = 0
        self._lost += self._put(told)
        return len(told)

    def _put(self, told: bytes) -> int:
        """How many of these bytes found no room."""
        left = memoryview(told)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS:
                raise
        return len(left)


def tolerate_full_disk() -> None:
    """From here on what this process prints cannot end it for want of room."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it was closed before Python began
            continue
        stream.flush()
        raw: Any = DiskFullTolerantWriter(stream.fileno(), name)  # unbuffered, as `python -u` has it
        told: Any = io.TextIOWrapper(raw, encoding=stream.encoding, errors=stream.errors, write_through=True)
        told.mode = "w"
        setattr(sys, name, told)
