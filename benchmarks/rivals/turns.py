"""Two torchrun gangs that take turns on one machine: while one trains the other waits and costs nothing."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

STORE = "RIVALS_STORE"  # the port of the store over which turns are given
SIDE = "RIVALS_SIDE"
STEPS_PER_TURN = 5
LONGEST = timedelta(minutes=10)


class Turns:
    """A rank's part. `step` stands where a step begins, or has just ended."""

    def __init__(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", int(os.environ[STORE]), is_master=False, timeout=LONGEST)
        self._side, self._rank = os.environ[SIDE], os.environ["RANK"]
        self._turn, self._left, self._spent = -1, 0, 0.0

    def step(self) -> bool:
        """Wait, where this is not our turn. False when there are no more."""
        if self._left == 0:
            if self._turn >= 0:
                spent = time.process_time() - self._spent
                self._store.set(f"{self._side}/{self._turn}/{self._rank}", str(spent))
            self._turn += 1
            if self._store.get(f"{self._side}/{self._turn}") == b"end":
                return False
            self._left, self._spent = STEPS_PER_TURN, time.process_time()
        self._left -= 1
        return True


class Step(NamedTuple):
    """What one took: by the clock, and of processors, all ranks together."""

    seconds: float
    processor_s: float


class Gang:
    """One side: ranks of one thread each under torchrun, which say nothing unless they fail."""

    def __init__(
        self, side: str, world: int, program: list[str], store: dist.TCPStore, folder: Path, extra: Mapping[str, str]
    ) -> None:
        self._side, self._world, self._store, self._turn = side, world, store, 0
        self._log = folder / f"{side}.log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", STORE: str(store.port), SIDE: side, **extra}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*torchrun, *meeting, *program], env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=folder
            )

        threading.Thread(target=self._answer_for_the_dead, daemon=True).start()

    def turn(self) -> Step:
        """From the word given to the last rank's answer."""
        started = time.perf_counter()
        self._store.set(f"{self._side}/{self._turn}", "go")
        self._store.wait(self._answers(), LONGEST)
        took = time.perf_counter() - started
        spent = sum(float(self._store.get(answer)) for answer in self._answers())
        if math.isnan(spent):
            raise RuntimeError(f"{self._side} ended:\n{self._log.read_text()[-4000:]}")
        self._turn += 1
        return Step(took / STEPS_PER_TURN, spent / STEPS_PER_TURN)

    def end(self) -> None:
        self._store.set(f"{self._side}/{self._turn}", "end")
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()

    def _answers(self) -> list[str]:
        return [f"{self._side}/{self._turn}/{rank}" for rank in range(self._world)]

    def _answer_for_the_dead(self) -> None:
        self._process.wait()
        for answer in self._answers():
            self._store.set(answer, "nan")
