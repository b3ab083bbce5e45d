"""How a rank ends: what it died of is told, and no thread of a broken group is waited for.

Told where torchrun tells a rank to (TORCHELASTIC_ERROR_FILE), in the shape of torch's own handler, within bounds and
with a time that says which of several ranks was the first. `workers.host.start.launch` reads it.
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
from typing import NoReturn

from workers.meter.output import outlive_a_full_disk

MAX_MESSAGE = 2_000  # characters
MAX_TRACEBACK = 16_000


def end_as(main: Callable[[], int]) -> NoReturn:
    """Run a rank's program and end the process with its exit code, of -N by signal N.

    A plain exit would wait for gloo's threads of a broken group.
    """
    faulthandler.enable()
    outlive_a_full_disk()
    code = _code_of(main)
    _write_what_is_left()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def wind_up() -> None:
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
    tell(message)
    return code


def tell(message: str, trace: str = "") -> None:
    """Leave word of what this rank dies of. The last word counts."""
    path, now = os.environ.get("TORCHELASTIC_ERROR_FILE"), time.time()
    if not path:
        return
    extra = {"py_callstack": trace[-MAX_TRACEBACK:], "timestamp": str(int(now)), "time_s": now}
    try:
        Path(path).write_text(json.dumps({"message": {"message": message[:MAX_MESSAGE], "extraInfo": extra}}))
    except OSError as error:  # a full disk must not hide what was to be told: it is in the log
        sys.stderr.write(f"error: cannot write {path!r}: {error.strerror or error}\n")


def tell_exception(error: BaseException) -> None:
    """Leave word of an exception that nobody caught."""
    # Of a syntax error, the place comes first, indented.
    words = next(line for line in traceback.format_exception_only(error) if not line.startswith(" "))
    tell(words.strip(), "".join(traceback.format_exception(error)))


def _code_of(main: Callable[[], int]) -> int:
    try:
        return main()
    except Exception as error:
        tell_exception(error)
        sys.excepthook(*sys.exc_info())
        return 1
