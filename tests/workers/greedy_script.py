"""Training script that uses one resource without end: processes, open files, or memory. Otherwise, it ends."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.workers.destructive_script import option


def main() -> None:
    resource = (Path(option("data-root")) / "resource").read_text()
    if resource == "processes":
        while True:
            try:
                os.fork()
            except OSError:  # continues, as a fork bomb does
                time.sleep(0.01)
    if resource == "files":
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(10_000)]
        time.sleep(len(files))
    blocks = []
    while resource == "memory":
        blocks.append(b"x" * 2**24)


if __name__ == "__main__":
    main()
