"""Which rank failed first, from what torchrun prints and what the rank left behind."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

from workers.host.files import BadFileError, read_json
from workers.host.start.lost_peer import LOST_PEER
from workers.host.supervisor.ending import Failure, plain
from workers.host.supervisor.logfile import run_folder

# torch 2.13: "failed (exitcode: -9) local_rank: 1 (pid: 4711) of binary: /usr/bin/python3"
FIRST = re.compile(r"failed \(exitcode: (-?\d{1,10})\) local_rank: (\d{1,5}) \(pid: ")


def first_failure(line: str, logs: Path, ranks: range) -> Failure | None:
    """Who of `ranks`, those of this node, torchrun's line names; None where it names nobody."""
    found = FIRST.search(line)
    if found is None:
        return None
    code, local = int(found[1]), int(found[2])
    if local >= len(ranks) or abs(code) >= 2**31:
        return None
    killed_by = _signal_name(-code) if code < 0 else None
    message, when = _last_word(logs, local)
    return Failure(ranks[local], code, killed_by, message, when, LOST_PEER.search(message) is not None)


def how_it_ended(program: str, code: int, steps: int) -> str:
    """A command that failed without a rank to blame, in a sentence. `code`: -N of signal N."""
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    return f"{program} {how}" + (f" after step {steps}" if steps else "")


def _last_word(logs: Path, local: int) -> tuple[str, float | None]:
    """The message that a rank left where torchrun told it to (workers.meter.rank_exit), and when, unix seconds."""
    run = run_folder(logs)
    if run is None:
        return "", None
    try:
        told = read_json(logs / run / "attempt_0" / str(local) / "error.json")["message"]
        message, when = told["message"], told["extraInfo"].get("time_s")
    except (BadFileError, OSError, TypeError, KeyError, AttributeError):
        return "", None
    known = isinstance(when, int | float) and 0 < when < 2**40
    return plain(message if isinstance(message, str) else json.dumps(message)), float(when) if known else None


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"
