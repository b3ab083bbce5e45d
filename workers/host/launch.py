"""torchrun that writes down who failed first: `python -m workers.host.launch FAILURE_FILE torchrun-args`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from workers.host.files import write_json


def main() -> int:
    failure_file, arguments = Path(sys.argv[1]), sys.argv[2:]
    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        # Of ranks that died at about the same time, one killed by a signal or that raised first is the cause; gloo
        # makes the others raise "connection reset" a moment later.
        failures = sorted(
            error.failures.values(), key=lambda f: (f.exitcode > 0 or f.exitcode == -signal.SIGTERM, f.timestamp)
        )
        first = failures[0]
        write_json(
            failure_file,
            {
                "rank": next(rank for rank, failure in error.failures.items() if failure is first),
                "exit_code": first.exitcode,
                "signal": first.signal_name() if first.exitcode < 0 else None,
                "time": first.timestamp,
            },
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
