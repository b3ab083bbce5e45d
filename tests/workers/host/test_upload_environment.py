"""The environment of an uploaded script, from the package list of the upload."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tests.support.processes import ROOT, scale_timeout
from workers.host import upload_environment
from workers.host.upload_environment import EXIT_CODE, EnvironmentBuildError, find_package_list

WHEEL = "demo-1.0-py3-none-any.whl"
METADATA = {
    "demo.py": "WORD = 'from the upload'",
    "demo-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n",
    "demo-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "demo-1.0.dist-info/RECORD": "",
}
IMPORT = "import importlib.util as u, sys; print(u.find_spec('demo') is not None, u.find_spec('torch') is not None)"


@pytest.fixture
def upload(tmp_path: Path) -> Path:
    folder = tmp_path / "upload"
    folder.mkdir()
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        for name, text in METADATA.items():
            wheel.writestr(name, text)
    (folder / "requirements.txt").write_text(f"./{WHEEL}\ntyping-extensions\n")
    return folder


def launch(upload: Path, allowed: str) -> subprocess.CompletedProcess[str]:
    folder = upload.parent / "environment"
    folder.mkdir()
    options = [f"--upload={upload}", f"--folder={folder}", f"--allowed={allowed}"]
    return subprocess.run(
        [sys.executable, "-m", "workers.host.upload_environment", *options, "--", "-c", IMPORT],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        timeout=scale_timeout(200),
        check=False,
    )


def test_packages_of_an_upload_are_installed_next_to_those_of_the_host(upload: Path) -> None:
    ran = launch(upload, "1")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "True True"
    assert "Requirement already satisfied: typing-extensions" in ran.stdout, "pip does not install it again"
    assert ran.stderr.splitlines() == [
        "meshboard: Installing the packages of requirements.txt.",
        "meshboard: The packages are installed.",
    ]


@pytest.mark.parametrize("has_list", [True, False])
def test_a_host_that_does_not_allow_it_runs_the_script_without_them(upload: Path, has_list: bool) -> None:
    if not has_list:
        (upload / "requirements.txt").unlink()
    ran = launch(upload, "0")
    note = "meshboard: requirements.txt is ignored. The admin of this host can allow it with "
    assert (ran.returncode, ran.stdout) == (0, "False True\n")
    assert ran.stderr == f"{note}MESHBOARD_UPLOAD_ENVIRONMENTS=1.\n" * has_list


@pytest.mark.extended
def test_failed_installation_has_the_lines_of_pip_and_a_reason(upload: Path) -> None:
    (upload / "requirements.txt").write_text("./missing-1.0-py3-none-any.whl\n")
    ran = launch(upload, "1")
    assert ran.returncode == EXIT_CODE
    *_, pip, last = filter(None, ran.stderr.splitlines())
    assert pip.startswith("ERROR:")
    assert last == (
        "meshboard: The packages of requirements.txt cannot be installed. "
        "pip ended with exit code 1. Read its last lines in the log."
    )


def test_lock_needs_uv(upload: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (upload / "uv.lock").touch()
    for uv, name in ((None, "requirements.txt"), ("/usr/bin/uv", "uv.lock")):
        monkeypatch.setattr("shutil.which", lambda _name, uv=uv: uv)
        assert find_package_list(upload) == upload / name
    assert find_package_list(upload.parent) is None


@pytest.mark.parametrize(
    ("limit_s", "max_bytes", "problem"),
    [(0.0, 2**40, "The installation took longer than"), (1e9, 1, r"The limit is 1 bytes\.")],
)
def test_installation_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_s: float, max_bytes: int, problem: str
) -> None:
    monkeypatch.setattr(upload_environment, "MAX_ENVIRONMENT_BYTES", max_bytes)
    monkeypatch.setattr(upload_environment, "DISK_CHECK_INTERVAL_S", 0.01)
    with pytest.raises(EnvironmentBuildError, match=problem):
        upload_environment._run(("sleep", "1000"), tmp_path, tmp_path, time.monotonic() + limit_s)
