"""Exit of a rank: report its error to torchrun, and never wait for threads of a broken group.

The report goes to TORCHELASTIC_ERROR_FILE in the format of torch's own handler. It is bounded, and has a precise time
that shows which rank failed first. `workers.host.launch` reads it. A full disk loses lines of output, but never
ends a rank.
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

MAX_MESSAGE_CHARS = 2_000
MAX_TRACEBACK_CHARS = 16_000


class DiskFullTolerantWriter(io.RawIOBase):
    """Write to a file descriptor. Count the bytes that a full disk loses, and report them when it has space again."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor, self._lost_bytes = descriptor, 0
        self.name = f"<{name}>"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Buffer, /) -> int:
        content = bytes(data)
        if self._lost_bytes:
            notice = f"\n[{self._lost_bytes:,} bytes of output are missing: the disk was full]\n"
            if self._write_or_lose(notice.encode()) == 0:
                self._lost_bytes = 0
        self._lost_bytes += self._write_or_lose(content)
        return len(content)

    def _write_or_lose(self, content: bytes) -> int:
        """Return the number of bytes that did not fit on the disk."""
        left = memoryview(content)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS:
                raise
        return len(left)


def tolerate_full_disk() -> None:
    """Replace stdout and stderr with streams that survive a full disk."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed before Python started
            continue
        stream.flush()
        raw: Any = DiskFullTolerantWriter(stream.fileno(), name)  # unbuffered, as with `python -u`
        wrapper: Any = io.TextIOWrapper(raw, encoding=stream.encoding, errors=stream.errors, write_through=True)
        wrapper.mode = "w"
        setattr(sys, name, wrapper)


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Run the program of a rank, and exit with its code. Code -N ends the process by signal N.

    A normal exit would wait for gloo's threads of a broken group.
    """
    faulthandler.enable()
    tolerate_full_disk()
    code = _run_main(main)
    _flush_open_files()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def finish_interpreter() -> None:
    """Do what Python does when its main program ends: join threads, then call exit handlers."""
    with contextlib.suppress(KeyboardInterrupt):  # the user does not want to wait
        threading._shutdown()  # type: ignore[attr-defined]  # only this function keeps Python's order
    atexit._run_exitfuncs()


def _flush_open_files() -> None:
    """Flush files that are still open, as Python would in a normal exit."""
    for file in gc.get_objects():
        if issubclass(type(file), io.IOBase):
            with contextlib.suppress(Exception):  # closed, or with faulty methods
                if stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # another thread may be blocked in a pipe
                    file.flush()
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):
            stream.flush()  # type: ignore[union-attr]
    ctypes.CDLL(None).fflush(None)


def print_line(line: str) -> None:
    """Write a line at once. `print` sends the newline separately, so lines of ranks that share a pipe would mix."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def fail(message: str, code: int) -> int:
    """Write an error to stderr and to torchrun, and return `code`."""
    sys.stderr.write(f"error: {message}\n")  # one write, because ranks that share a pipe would mix their lines
    sys.stderr.flush()
    report_error(message)
    return code


def report_error(message: str, trace: str = "") -> None:
    """Write the error of this rank for torchrun. The last report wins."""
    path, now = os.environ.get("TORCHELASTIC_ERROR_FILE"), time.time()
    if not path:
        return
    extra = {"py_callstack": trace[-MAX_TRACEBACK_CHARS:], "timestamp": str(int(now)), "time_s": now}
    try:
        Path(path).write_text(json.dumps({"message": {"message": message[:MAX_MESSAGE_CHARS], "extraInfo": extra}}))
    except OSError as error:  # a full disk must not hide the error, which is in the log
        sys.stderr.write(f"error: cannot write {path!r}: {error.strerror or error}\n")


def report_exception(error: BaseException) -> None:
    """Write an uncaught exception for torchrun."""
    report_error(format_message(error), "".join(traceback.format_exception(error)))


def format_message(error: BaseException) -> str:
    """Return the type and message of an exception. An exception group also shows its first exception."""
    # A syntax error starts with its indented location.
    message = next(line for line in traceback.format_exception_only(error) if not line.startswith(" ")).strip()
    inner = error
    while isinstance(inner, BaseExceptionGroup):
        inner = inner.exceptions[0]
    return message if inner is error else f"{message}, first {format_message(inner)}"


def _run_main(main: Callable[[], int]) -> int:
    try:
        return main()
    except Exception as error:
        report_exception(error)
        sys.excepthook(*sys.exc_info())
        return 1
