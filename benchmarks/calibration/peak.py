"""The trainer, and how far rank 0's resident set rose since before the model was built, written to a file.

python -m torch.distributed.run ... -m benchmarks.calibration.peak FILE trainer-arguments
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from workers.trainer import __main__ as program
from workers.trainer import trainer

PERIOD_S = 0.002


def resident() -> int:
    """Bytes this process has in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    out = Path(sys.argv.pop(1))
    if os.environ["RANK"] != "0":
        return program.main()
    done, found = threading.Event(), {"before": 0, "peak": 0}
    build = trainer.parallelize

    def build_and_mark(*arguments: Any) -> Any:
        found["before"] = resident()
        return build(*arguments)

    def watch() -> None:
        while not done.wait(PERIOD_S):
            found["peak"] = max(found["peak"], resident())

    trainer.parallelize = build_and_mark
    watcher = threading.Thread(target=watch)
    watcher.start()
    code = program.main()
    done.set()
    watcher.join()
    out.write_text(json.dumps(found["peak"] - found["before"]))
    return code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
