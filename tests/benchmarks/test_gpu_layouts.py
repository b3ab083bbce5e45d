"""Check that layouts of `make gpu` keep their results if a layout ends its ranks or the call is cut."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import layouts
from benchmarks.gpu.machine import Fingerprint
from benchmarks.gpu.results import PartOutput, open_pieces_file
from tests.support.processes import scale_timeout

NAMES = ["dp2 m4", "zero1 dp2", "zero2 dp2", "zero3 dp2"]
HERE = Fingerprint(torch="2", device="none", count=1, commit="c", small=True)
# Of the ranks' program: ends by itself at one, stands still at another, and begins none after a third.
RANKS = """
import json, sys, time
from pathlib import Path
folder, pieces = (Path(sys.argv[sys.argv.index(name) + 1]) for name in ("--folder", "--pieces"))
names, ends, stands, leaves = sys.argv[sys.argv.index("--until") + 2:], "ENDS", "STANDS", "LEAVES"
with pieces.open("a") as file:
    for name in names:
        print(json.dumps({"name": name}), file=file, flush=True)
        if name == ends:
            raise ValueError("the reason")
        if name == stands:
            time.sleep(1000)
        if name == leaves:
            sys.exit(0)
        good = {"wrong": [], "gradient": 1e-7, "loss": 0.0, "loss_from_cpu": 0.0, "bytes_off": 0, "calls_off": 0}
        print(json.dumps({"name": name, **good}), file=file, flush=True)
"""


class Tries:
    """Calls of the part's program with scripted ranks."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pieces, self._program = open_pieces_file(folder, "layouts", HERE, fresh=False), folder / "program.py"
        self.begun: list[list[str]] = []
        monkeypatch.setattr(layouts, "build_torchrun_command", self._torchrun)

    def _torchrun(self, _ranks: int, _module: str, *own: str) -> tuple[str, ...]:
        self.begun.append(list(own[own.index("--until") + 2 :]))
        return sys.executable, str(self._program), *own

    def __call__(self, ends: str = "", stands: str = "", leaves: str = "", left_s: float = 3600.0) -> PartOutput:
        self._program.write_text(RANKS.replace("ENDS", ends).replace("STANDS", stands).replace("LEAVES", leaves))
        self.begun.clear()
        return layouts.summarize(NAMES, layouts.run_layouts(NAMES, "fp32", layouts.read_clock() + left_s, self.pieces))


@pytest.fixture
def tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tries:
    return Tries(tmp_path, monkeypatch)


def test_reports_a_layout_that_ends_its_ranks_and_continues(tries: Tries, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "STALL_TIMEOUT_S", scale_timeout(1.0))
    found = tries(ends="zero1 dp2", stands="zero2 dp2")
    assert found["measured"]["layouts equal to reference"] == 2
    assert found["beside"]["layouts equal to reference"] == 4
    assert [one.partition(" (")[0].split(": ")[0] for one in found["wrong"]] == ["zero1 dp2", "zero2 dp2"]
    assert "ValueError: the reason" in found["wrong"][0]
    assert "stood still" in found["wrong"][1]
    assert found["untried"] == []
    again = tries()
    assert tries.begun == [["zero1 dp2", "zero2 dp2"]], "what was equal is not tried again"
    assert again["wrong"] == []
    assert again["measured"]["layouts equal to reference"] == 4
    first, second = again["notes"]
    assert first.startswith("zero1 dp2: equal when tried again; before: ")
    assert "stood still" in second


def test_next_call_continues_with_remaining_layouts(tries: Tries) -> None:
    first = tries(leaves="zero2 dp2")
    assert (first["untried"], first["wrong"]) == (["zero2 dp2", "zero3 dp2"], [])
    assert tries(left_s=0.0)["untried"] == ["zero2 dp2", "zero3 dp2"]
    assert tries.begun == [], "none is begun that could not end"
    os.utime(tries.pieces, (0, 0))  # the last call was long ago, and no rank has stood still since
    found = tries()
    assert tries.begun == [["zero2 dp2", "zero3 dp2"]]
    assert found["untried"] == []
    assert found["measured"]["layouts equal to reference"] == 4


def test_layout_cut_by_the_end_of_a_call_is_not_failed(tries: Tries, monkeypatch: pytest.MonkeyPatch) -> None:
    time_s = [0.0]
    monkeypatch.setattr(layouts, "read_clock", lambda: time_s[0])

    def ended(_argv: object, log: Path, pieces: Path, until: float) -> None:
        layouts.append_result(pieces, {"name": "dp2 m4"})
        log.touch()
        time_s[0] = until

    monkeypatch.setattr(layouts, "run_program", ended)
    found = tries()
    assert (found["wrong"], found["untried"]) == ([], NAMES)
    assert time_s == [3600.0], "and none is begun after it"


def test_new_layouts_run_before_failed_ones(tries: Tries) -> None:
    layouts.append_result(tries.pieces, {"name": "dp2 m4", "wrong": ["another gradient"]})
    found = tries()
    assert tries.begun == [["zero1 dp2", "zero2 dp2", "zero3 dp2"], ["dp2 m4"]]
    assert found["wrong"] == []


def test_reuses_no_results_of_another_machine_or_commit(tmp_path: Path) -> None:
    def kept(machine: Fingerprint, *, fresh: bool = False) -> list[str]:
        return [
            one["name"] for one in layouts.read_finished(open_pieces_file(tmp_path, "layouts", machine, fresh=fresh))
        ]

    layouts.append_result(open_pieces_file(tmp_path, "layouts", HERE, fresh=False), {"name": "dp2 m4", "wrong": []})
    assert kept(HERE) == ["dp2 m4"]
    assert kept(HERE, fresh=True) == []
    layouts.append_result(open_pieces_file(tmp_path, "layouts", HERE, fresh=False), {"name": "dp2 m4", "wrong": []})
    assert kept({**HERE, "commit": "d"}) == []  # type: ignore[typeddict-item]  # the same fields
    assert kept(HERE) == []


def test_ignores_a_truncated_line(tries: Tries) -> None:
    good = {"name": "dp2 m4", "wrong": []}
    tries.pieces.write_text(f"{json.dumps(HERE)}\n{json.dumps(good)}\n{json.dumps(good)[:9]}")
    assert [one["name"] for one in layouts.read_finished(tries.pieces)] == ["dp2 m4"]
