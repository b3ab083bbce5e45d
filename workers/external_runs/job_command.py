"""Run the command line of a script job: the launcher of a user, whose ranks meter themselves.

The words of the command come from the spec file. Options of torchrun that the command leaves out have the values of the
job: the number of ranks, a log of each rank, and a free port.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from workers.disk import write_json
from workers.external_runs.child_process import FIRST_FAILURE_LINE, get_shell_code, parse_first_failure
from workers.host.hook import build_hook_variables
from workers.host.rank_files import RankFailure
from workers.meter.script import ScriptError, find_command_folder

MAX_READ_BYTES = 64 * 2**10  # of the end of the launcher's log


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.external_runs.job_command", allow_abbrev=False)
    for name in ("spec", "root", "telemetry", "logs", "failure"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--run", required=True, help="job/attempt")
    parser.add_argument("--ranks", type=int, required=True)
    options = parser.parse_args()
    try:
        command, folder = find_command_folder(options.spec, options.root)
    except ScriptError as error:
        return _fail(str(error), 2)
    words = shlex.split(command)
    signal.signal(signal.SIGTERM, lambda *_: None)  # the command gets it too, in the same process group
    try:
        code = subprocess.run(words, cwd=folder, env=build_environment(options), check=False).returncode
    except OSError as error:
        return _fail(f"`script.command` cannot start {words[0]!r}: {error.strerror or error}.", 127)
    if code and (failure := _find_failure(options.logs, options.ranks)):
        write_json(options.failure, _build_report(failure))
    return get_shell_code(code)


def build_environment(options: argparse.Namespace) -> dict[str, str]:
    """Return the environment of the command."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    torchrun = {
        "PET_NPROC_PER_NODE": str(options.ranks),
        "PET_LOG_DIR": str(options.logs),
        "PET_REDIRECTS": "3",
        "PET_RDZV_BACKEND": "c10d",  # torchrun's default is port 29500, which another job may use
        "PET_RDZV_ENDPOINT": "127.0.0.1:0",
    }
    run = {"PATH": path, "MESHBOARD_RUN_NAME": options.run, "MESHBOARD_RANKS": str(options.ranks)}
    return {**os.environ, **torchrun, **run, **build_hook_variables(options.telemetry)}


def _find_failure(logs: Path, ranks: int) -> RankFailure | None:
    """Return the rank that torchrun names in the launcher's log as the first that failed."""
    with (logs / "launcher.log").open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - MAX_READ_BYTES))
        lines = log.read().decode(errors="replace").splitlines()
    named = [line for line in lines if FIRST_FAILURE_LINE.search(line)]
    return parse_first_failure(named[-1], logs, range(ranks)) if named else None


def _build_report(failure: RankFailure) -> dict[str, Any]:
    return {
        "rank": failure.rank,
        "exit_code": failure.exit_code,
        "signal": failure.signal,
        "time": failure.time,
        "message": failure.message,
        "lost_peer": failure.lost_peer,
    }


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"error: {message}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
