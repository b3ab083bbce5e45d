"""Only SIGTERM from the parent ends a process with a blocked SIGTERM."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.processes import ROOT, scale_timeout, wait_until
from workers.rank_environment import TERM_FROM_PARENT_VARIABLE

SHIELDED = """
import os, signal, sys, time
from workers import rank_environment
if sys.argv[1] == "guardian":
    import subprocess
    rank_environment.block_sigterm()
    child = subprocess.Popen([sys.executable, "-c", sys.stdin.read(), "rank"], stdin=subprocess.PIPE)
    print(child.pid, flush=True)
    signal.sigwait({signal.SIGUSR1})
    print("the parent ends it", flush=True)
    child.terminate()
    sys.exit(child.wait())
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"is ended\\n"), os._exit(1)))
signal.signal(signal.SIGWINCH, lambda *_: os.write(1, b"goes on\\n"))
rank_environment.accept_sigterm_from_parent()
while True:
    time.sleep(0.02)
"""


@pytest.fixture
def guardian(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """Start a guardian that ends its child by SIGTERM on request. Both print what they do."""
    monkeypatch.setenv(TERM_FROM_PARENT_VARIABLE, "1")
    argv = [
        sys.executable,
        "-c",
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})" + SHIELDED,
    ]
    pipe = subprocess.PIPE
    process = subprocess.Popen([*argv, "guardian"], cwd=ROOT, stdin=pipe, stdout=pipe, start_new_session=True)
    assert process.stdin is not None
    process.stdin.write(SHIELDED.encode())
    process.stdin.close()
    yield process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its child too, where a test failed
    process.wait()


def test_only_sigterm_of_the_parent_ends_the_child(guardian: subprocess.Popen[bytes]) -> None:
    assert guardian.stdout is not None
    rank = int(guardian.stdout.readline())
    for pid in (guardian.pid, rank):
        os.kill(pid, signal.SIGTERM)  # this process is the parent of the guardian, which ignores it
    wait_until(lambda: not _pending(rank), "the rank has taken it")
    os.kill(rank, signal.SIGWINCH)
    assert guardian.stdout.readline() == b"goes on\n"
    guardian.send_signal(signal.SIGUSR1)
    assert guardian.wait(scale_timeout(20)) == 1
    assert guardian.stdout.read().decode().splitlines() == ["the parent ends it", "is ended"]


def _pending(pid: int) -> bool:
    """Return True if SIGTERM is pending."""
    with open(f"/proc/{pid}/status") as status:
        bits = next(line for line in status if line.startswith("ShdPnd"))
    return bool(int(bits.split()[1], 16) & 1 << (signal.SIGTERM - 1))
