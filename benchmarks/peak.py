"""The trainer, with rank 0's peak resident set above its start written down: `-m benchmarks.peak FILE trainer-args`."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

from workers.trainer import __main__ as trainer

PERIOD_S = 0.002


def resident() -> int:
    """Bytes this process has in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    out = Path(sys.argv.pop(1))
    if os.environ["RANK"] != "0":
        return trainer.main()
    before = peak = resident()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(PERIOD_S):
            peak = max(peak, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = trainer.main()
    done.set()
    watcher.join()
    out.write_text(json.dumps(peak - before))
    return code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
