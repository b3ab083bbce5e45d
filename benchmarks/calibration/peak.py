"""Train, and write the rise of the resident set of rank 0 since before the model was built to a file.

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

POLL_S = 0.002


def read_resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    out = Path(sys.argv.pop(1))
    if os.environ["RANK"] != "0":
        return program.main()
    done, found = threading.Event(), {"before": 0, "peak": 0}
    build = trainer.parallelize

    def build_and_mark(*arguments: Any) -> Any:
        found["before"] = read_resident_bytes()
        return build(*arguments)

    def watch() -> None:
        while not done.wait(POLL_S):
            found["peak"] = max(found["peak"], read_resident_bytes())

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
