"""Check that systemd accepts the units, and that a restart of the worker ends no run."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.processes import ROOT

UNIT = ROOT / "deploy" / "systemd" / "meshboard-host.service"
UNITS = sorted(UNIT.parent.glob("*.service"))


def read_service(path: Path = UNIT) -> configparser.SectionProxy:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(path)
    return unit["Service"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    """Use the Python of this machine, because systemd checks that it can be started."""
    units = [tmp_path / path.name for path in UNITS]
    for path, unit in zip(UNITS, units, strict=True):
        text = path.read_text()
        unit.write_text(text.replace("/opt/meshboard/.venv/bin/python", sys.executable))
        assert unit.read_text() != text
    done = subprocess.run(["systemd-analyze", "verify", *map(str, units)], capture_output=True, text=True, check=False)
    result = [line for line in done.stderr.splitlines() if "meshboard-" in line]
    assert (done.returncode, result) == (0, [])
    unit, text = tmp_path / UNIT.name, UNIT.read_text()
    unit.write_text(text.replace("KillMode=process", "KillMode=procress"))
    wrong = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert "procress" in wrong.stderr, "it would have told"


def test_restart_ends_only_the_worker_process() -> None:
    """tests/faults checks that the runs continue."""
    result = read_service()
    assert (result["KillMode"], result["Restart"], result["OOMPolicy"]) == ("process", "always", "continue")
    assert result["ExecStart"].split()[1:] == ["-m", "workers.host.join"]
    assert "MESHBOARD_JOIN_TOKEN" not in result.get("Environment", ""), "units are everybody's to read"


def test_units_start_the_commands_of_the_containers() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for name in ("web", "controller", "recorder"):
        result = read_service(UNIT.with_name(f"meshboard-{name}.service"))
        wanted = services[name]["command"].replace("manage.py", "-m webapp.manage").replace("--host 0.0.0.0 ", "")
        assert result["ExecStart"].partition(" ")[2] == wanted.partition(" ")[2]
        assert (result["User"], result["Restart"]) == ("meshboard", "always")
        assert result["StateDirectory"] != read_service()["StateDirectory"], "a host of the same machine is root's"
