"""Benchmarks' ranks end as the trainer's do: a plain exit may meet gloo's threads on their way out, and abort."""

from __future__ import annotations

import re

import pytest

from tests.support.processes import ROOT

JOINS = r"init_process_group\(|from benchmarks\.gpu\.rank import .*\bmeet\b"
ENDS = r"\brun_and_exit\b.*main|os\._exit\("


def programs_of_ranks() -> list[str]:
    found = []
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        text = path.read_text()
        if "__main__" in text and re.search(JOINS, text):
            found.append(str(path.relative_to(ROOT)))
    return found


@pytest.mark.parametrize("program", programs_of_ranks())
def test_a_rank_waits_for_no_thread_of_its_group(program: str) -> None:
    assert re.search(ENDS, (ROOT / program).read_text()), f"{program} exits plainly"


def test_the_ranks_of_make_gpu_are_among_them() -> None:
    told = {"metering", "wire", "training", "layouts_rank"}
    assert {f"benchmarks/gpu/{name}.py" for name in told} <= set(programs_of_ranks())
