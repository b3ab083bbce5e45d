"""The step times of a torchrun script equal the times that the script measures itself."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from contracts.codec import decode_frame
from contracts.telemetry.items import WARMUP_STEPS, StepItem, list_step_times
from tests.support.processes import ROOT, scale_timeout
from tests.support.ranks import build_torchrun_command, run_to_completion

HERE = Path(__file__).parent


class Supervisor:
    """Receive the items of all ranks over a Unix socket."""

    def __init__(self, path: Path) -> None:
        self.items: dict[int, list[Any]] = defaultdict(list)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            threading.Thread(target=self._receive, args=(connection,), daemon=True).start()

    def _receive(self, connection: socket.socket) -> None:
        while size := connection.recv(4, socket.MSG_WAITALL):
            frame = decode_frame(connection.recv(int.from_bytes(size), socket.MSG_WAITALL))
            self.items[frame["rank"]] += frame["items"]


def get_times(items: list[StepItem]) -> list[float]:
    return [seconds for item in items for seconds in list_step_times(item)]


def test_step_times_equal_the_clock_of_the_script(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path / "s")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": str(ROOT)}
    meter = ("-m", "workers.meter", "--telemetry", str(tmp_path / "s"), str(HERE / "scripts/clock.py"), str(tmp_path))
    ran = run_to_completion(build_torchrun_command(2, *meter), environment, cwd=Path("/"), limit_s=scale_timeout(100))
    assert ran.returncode == 0, ran.stderr
    for rank in range(2):
        own = json.loads((tmp_path / f"{rank}.json").read_text())
        items = [item for item in supervisor.items[rank] if item["kind"] == "step"]
        times = get_times(items)
        assert len(times) == len(own) == 49
        assert sum(times) == pytest.approx(sum(own), rel=0.02)
        assert median(times) == pytest.approx(median(own), rel=0.02)
        assert {item["samples"] for item in items} == {8}
        assert all("data" in item["parts"] and "optimizer" in item["parts"] for item in items)
        assert all(item.get("over", 1) == 1 for item in items if item["step"] <= WARMUP_STEPS)
        assert items[-1]["step"] == 50
        assert items[-1]["cells"][0]["count"] == 48
