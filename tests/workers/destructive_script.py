"""Training script that breaks all that it can reach: its working files, its log folder, and its telemetry socket."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

import msgpack

NAMES = ("exit.json", "order.json", "supervisor.pid", "running", "acknowledged", "note.json", "failure.json")
FLOOD_BYTES = 24 * 2**20


def option(name: str) -> str:
    return next(word.partition("=")[2] for word in sys.argv if word.startswith(f"--{name}="))


def frame(**fields: Any) -> bytes:
    """Return a broken item together with a valid item."""
    good = {"kind": "phase", "rank": 0, "time": 1.0, "phase": "step"}
    items = [{**good, **fields}, good] if fields else [good]
    header = {"v": 1, "job": option("job"), "attempt": int(option("attempt")), "rank": 0}
    body: bytes = msgpack.packb({**header, "items": items})
    return struct.pack(">I", len(body)) + body


def send(sent: bytes, patience_s: float = 10) -> bool:
    """Return True if the supervisor closed the connection."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(option("telemetry"))
        connection.settimeout(patience_s)
        connection.sendall(sent)
        try:
            return connection.recv(1) == b""
        except TimeoutError:
            return False


def spoil_files(root: Path) -> None:
    """Break every kind of file of a supervisor in every folder that the job knows."""
    for folder in (Path.cwd(), Path.cwd().parent, Path(option("spec")).parent, root):
        for name in NAMES:
            with contextlib.suppress(OSError):
                (folder / name).write_text('{"v": 1, "outcome": "succ')


def spoil_logs(root: Path) -> None:
    own = Path(os.readlink("/proc/self/fd/1")).parent
    run = own.parent.parent
    (run.parent / "another").mkdir()
    os.mkfifo(run.parent / "another" / "waiting.log")
    (own / "stderr.log").unlink()
    (own / "stderr.log").symlink_to(root / "secret.log")
    os.mkfifo(own / "more.log")
    with (own / "sparse.log").open("wb") as out:
        out.truncate(4 * 2**40)


def main() -> None:
    root = Path(option("data-root"))
    spoil_files(root)
    spoil_logs(root)
    wrong = {
        "a step without fields": frame(kind="step"),
        "a loss that is no number": frame(kind="eval", step=1, loss=float("nan")),
        "a text that is no list": frame(kind="verdict", rows="none"),
        "a word of NUL": frame(phase="\0"),
    }
    nonsense: dict[str, bytes] = {
        "a log in another's name": frame(kind="log", first=0, lines=["forged"]),
        "a gap": frame(kind="gap", items=2**62),
        "no frame": struct.pack(">I", 3) + b"\xc1\xc1\xc1",
    }
    result = {what: send(sent) for what, sent in nonsense.items()}
    result |= {what: send(sent, 0.5) for what, sent in {**wrong, "a frame of its own": frame()}.items()}
    Path("told.part").write_text(json.dumps(result))
    Path("told.part").rename("told.json")
    line = b"x" * 99 + b"\n"
    for _ in range(FLOOD_BYTES // 100 // 1000):
        os.write(1, line * 1000)
    print("the end", flush=True)
    while not Path("go").exists():
        time.sleep(0.05)


if __name__ == "__main__":
    main()
