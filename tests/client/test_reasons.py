"""The command says why a layout was chosen, and because of which part of a step another would be faster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.client.conftest import FakeServer, Ran
from tests.client.test_api import JOB

Meshboard = Callable[..., Ran]
CHOSEN = {"words": "dp 4", "ranks": 4, "why": "dp 4: 0.1 s per step\x1b[2J."}


def test_shows_the_reason_of_a_chosen_layout(meshboard: Meshboard, server: FakeServer, tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("layout: auto")
    server.respond_at("jobs", {**JOB, "chosen": CHOSEN}, 201)
    ran = meshboard("submit", str(spec), at=server)
    assert (ran.code, ran.out) == (0, "j\n")
    assert ran.err.splitlines()[1] == "layout on 4 ranks: dp 4: 0.1 s per step."
    server.respond_at("jobs", {**JOB, "chosen": None}, 201)
    assert len(meshboard("submit", str(spec), at=server).err.splitlines()) == 1


def option(change: str, part: str) -> dict[str, Any]:
    because = {"part": part, "apportioned_s": 0.04, "there_s": 0.01}
    return {"change": change, "step_s": 0.07, "faster": 0.3, "memory_bytes": 2**30, "because": because}


def test_advice_names_the_largest_gain_and_its_basis(meshboard: Meshboard, server: FakeServer) -> None:
    measured = {"measured_s": None, "measured_at_most_s": None}
    parts = [
        {"part": "tp", **measured, "measured_s": 0.041},
        {"part": "dp", **measured, "measured_at_most_s": 0.05},
        {"part": "bubble", **measured},
    ]
    unsure = [option("dp 1", "dp"), option("pp 1", "bubble")]
    server.respond_at(
        "jobs/j/advice", {"text": "tp 1: 30%.", "options": [option("tp 1", "tp")], "unsure": unsure, "parts": parts}
    )
    shown = meshboard("advise", "j", at=server).out.splitlines()
    assert shown[0] == "tp 1: 30%."
    assert [" ".join(line.split()) for line in shown[-4:]] == [
        "change largest gain in this run with the change basis",
        "tp 1 tp 40 ms 10 ms measured: 41 ms",
        "dp 1 dp 40 ms 10 ms measured: 50 ms at most",
        "pp 1 bubble 40 ms 10 ms estimate, not measured",
    ]
    server.respond_at(
        "jobs/j/advice", {"text": "No choice is surely faster.", "options": [], "unsure": [], "parts": parts}
    )
    assert meshboard("advise", "j", at=server).out == "No choice is surely faster.\n"
