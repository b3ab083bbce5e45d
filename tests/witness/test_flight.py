"""torch's own flight recorder lists what the meter lists: call by call, in order, by group and bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.parity.cases import Case, write_data
from tests.witness.compare import ROOT

FLOWN: dict[str, Any] = {
    "primitives": (2, None),
    "dp2 x tp2": (4, Case("gpt", "dp2 x tp2").spec),
    "zero3 dp2 x tp2 sp": (4, Case("llama", "zero3 dp2 x tp2 sp").spec),
}


@pytest.mark.parametrize("name", list(FLOWN))
def test_the_flight_recorder_and_the_meter_agree_call_by_call(name: str, tmp_path: Path) -> None:
    ranks, spec = FLOWN[name]
    content = "null" if spec is None else spec.model_dump_json()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    argv = [*torchrun, *meeting, "-m", "tests.witness.flight", str(tmp_path), content]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_FR_BUFFER_SIZE": "5000"}
    write_data(tmp_path)
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(ranks):
        said = json.loads((tmp_path / f"flight-{rank}.json").read_text())
        assert len(said["recorded"]) > 5
        assert said["metered"] == said["recorded"]
