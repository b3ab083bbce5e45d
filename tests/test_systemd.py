"""deploy/systemd: systemd accepts the unit, and restarting the worker by it ends no run."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT

UNIT = ROOT / "deploy" / "systemd" / "meshboard-host.service"


def service() -> configparser.SectionProxy:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    return unit["Service"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """With the Python that is here: it looks whether that can be started."""
    unit = tmp_path / UNIT.name
    text = UNIT.read_text()
    unit.write_text(text.replace("/opt/meshboard/.venv/bin/python", sys.executable))
    assert unit.read_text() != text
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    told = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert (done.returncode, told) == (0, [])
    unit.write_text(text.replace("KillMode=process", "KillMode=procress"))
    wrong = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert "procress" in wrong.stderr, "it would have told"


def test_only_the_worker_s_own_process_is_ended() -> None:
    """tests/faults shows that the runs go on then, and that the next worker finds them."""
    told = service()
    assert (told["KillMode"], told["Restart"], told["OOMPolicy"]) == ("process", "always", "continue")
    assert told["ExecStart"].split()[1:] == ["-m", "workers.host.join"]
    assert "MESHBOARD_JOIN_TOKEN" not in told.get("Environment", ""), "units are everybody's to read"
