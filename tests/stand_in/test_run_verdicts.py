"""Check that a run on stand-ins passes only if it reports correct results."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.stand_in.__main__ import judge_training
from tests.stand_in.build import StandInBuildError, build

MATCH = "gradients, updates, and norms match the single-process reference to 8e-08 (...)"
PROOF = f"verification: replicas match (1 of 1); {MATCH}\n"
EXACT = "traffic check: measured 10 B, absolute difference 0 B, 0 calls\n"
UNCHECKED = f"verification: {MATCH}; extra final step not compared: one device; equal"
OFF = "traffic check: measured 10 B, absolute difference 4 B, 0 calls\n"


@pytest.mark.parametrize(
    ("code", "out", "said", "expected"),
    [
        (0, PROOF + EXACT, "", "equal to 8e-08; 0 B, 0 calls on 1 ranks"),
        (0, PROOF + EXACT + OFF, "", f"FAILED: {OFF.strip()}"),
        (0, PROOF + UNCHECKED + EXACT, "", f"FAILED: {UNCHECKED.rpartition(';')[0]}"),
        (0, EXACT, "", "FAILED: the run reported no result"),
        (
            1,
            PROOF + EXACT,
            "stand-in: rank 0: a message never arrived\n",
            "FAILED: stand-in: rank 0: a message never arrived",
        ),
        (
            1,
            PROOF + EXACT,
            "[rank1]: Traceback\n[rank1]: RuntimeError: two devices\n",
            "FAILED: RuntimeError: two devices",
        ),
        (1, PROOF + EXACT, "", "FAILED: see --show"),
    ],
)
def test_judges_a_run_by_its_verification(code: int, out: str, said: str, expected: str) -> None:
    assert judge_training(subprocess.CompletedProcess([], code, out, said)) == expected


def test_rejects_a_torch_without_cuda(tmp_path: Path) -> None:
    with pytest.raises(StandInBuildError, match="no CUDA build of torch"):
        build(tmp_path, tmp_path)
