"""Training script that ignores TERM and leaves a child in another session after two forks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True:
                time.sleep(0.2)
        os._exit(0)
    Path(f"environment-{os.environ['RANK']}").write_text("\n".join(f"{k}={v}" for k, v in os.environ.items()))
    print("stubborn and ready", flush=True)
    while True:
        time.sleep(0.2)


if __name__ == "__main__":
    main()
