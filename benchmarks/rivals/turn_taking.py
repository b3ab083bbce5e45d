"""Let two torchrun groups take turns on one machine: while one trains, the other waits without CPU time."""

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
TIMEOUT = timedelta(minutes=10)


class Turns:
    """Turns of a rank. Call `step` at the start or the end of a step."""

    def __init__(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", int(os.environ[STORE]), is_master=False, timeout=TIMEOUT)
        self._side, self._rank = os.environ[SIDE], os.environ["RANK"]
        self._turn, self._left, self._spent = -1, 0, 0.0

    def step(self) -> bool:
        """Wait for the turn of this side. Return False after the last one."""
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
    """Wall time and CPU time of a step of all ranks."""

    seconds: float
    processor_s: float


class RankGroup:
    """Ranks of one side, with one thread each under torchrun. They print only errors."""

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

        threading.Thread(target=self._check_alive, daemon=True).start()

    def run_turn(self) -> Step:
        """Run a turn until the last rank has answered."""
        started = time.perf_counter()
        self._store.set(f"{self._side}/{self._turn}", "go")
        self._store.wait(self._collect_steps(), TIMEOUT)
        took = time.perf_counter() - started
        spent = sum(float(self._store.get(answer)) for answer in self._collect_steps())
        if math.isnan(spent):
            raise RuntimeError(f"{self._side} ended:\n{self._log.read_text()[-4000:]}")
        self._turn += 1
        return Step(took / STEPS_PER_TURN, spent / STEPS_PER_TURN)

    def stop(self) -> None:
        self._store.set(f"{self._side}/{self._turn}", "end")
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()

    def _collect_steps(self) -> list[str]:
        return [f"{self._side}/{self._turn}/{rank}" for rank in range(self._world)]

    def _check_alive(self) -> None:
        self._process.wait()
        for answer in self._collect_steps():
            self._store.set(answer, "nan")
