"""`python -m workers.host.stop RUN_DIR`: end every attempt on this host and wait until nothing is left."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from workers.host.attempts import attempts
from workers.host.processes import sweep
from workers.host.watch import kill_supervisor

TIMEOUT_S = 20.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.host.stop", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN_DIR", help="run directory of the host worker (MESHBOARD_RUN_DIR)"
    )
    run_dir: Path = parser.parse_args().run_dir.resolve()
    if not run_dir.is_dir():
        parser.error(f"{run_dir} is not a folder. No process was stopped.")
    live = [attempt for attempt in attempts(run_dir) if attempt.supervisor_id() is not None]
    for attempt in live:
        supervisor = attempt.supervisor_id()
        if supervisor is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(supervisor.pid, signal.SIGTERM)
    # A supervisor has done its duty once the exit report is on disk: it may wait long for Redis after that.
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and any(a.supervisor_id() is not None and not a.exit.exists() for a in live):
        time.sleep(0.1)
    for attempt in live:
        kill_supervisor(attempt)
    print(f"{len(live)} {'attempt' if len(live) == 1 else 'attempts'} ended")
    survivors = [pid for attempt in attempts(run_dir) for pid in sweep(attempt.job, attempt.attempt, runs=run_dir)]
    if survivors:
        print(f"cannot stop processes {survivors}", file=sys.stderr)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
