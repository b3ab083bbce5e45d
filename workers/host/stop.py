"""`python -m workers.host.stop RUN_DIR`: end every attempt on this host and wait until nothing is left."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from workers.host.attempt_watcher import kill_supervisor
from workers.host.attempts import iterate_unacknowledged
from workers.host.processes import kill_processes

TIMEOUT_S = 20.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.host.stop", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN_DIR", help="run directory of the host worker (MESHBOARD_RUN_DIR)"
    )
    run_dir: Path = parser.parse_args().run_dir.resolve()
    if not run_dir.is_dir():
        parser.error(f"{run_dir} is not a folder. No process was stopped.")
    living = [attempt for attempt in iterate_unacknowledged(run_dir) if attempt.get_supervisor() is not None]
    for attempt in living:
        if (supervisor := attempt.get_supervisor()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(supervisor.pid, signal.SIGTERM)
    deadline = time.monotonic() + TIMEOUT_S
    # With the report on disk, a supervisor only waits for Redis.
    while time.monotonic() < deadline and any(a.get_supervisor() and not a.exit_file.exists() for a in living):
        time.sleep(0.1)
    for attempt in living:
        kill_supervisor(attempt)
    print(f"{len(living)} {'attempt' if len(living) == 1 else 'attempts'} ended")
    survivors = []
    for attempt in iterate_unacknowledged(run_dir):
        survivors += kill_processes(attempt.job, attempt.attempt, run_dir=run_dir)
    if survivors:
        print(f"cannot stop processes {survivors}", file=sys.stderr)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
