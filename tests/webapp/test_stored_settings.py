"""Commands in the checkout of a `make up` board use the settings of that board."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT, base_environment

STORED = {"secret_key": "k" * 20 + "0123456789-abcdefghij-ABCDEFGHIJ", "redis_password": "word", "redis_port": "20001"}
PRINT = "import django; django.setup(); from django.conf import settings as s; print(s.REDIS_URL, s.STATE_DIR)"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    for name, text in STORED.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def command(state: Path, *argv: str, **values: str) -> subprocess.CompletedProcess[str]:
    environment = {**base_environment(), "MESHBOARD_STATE_DIR": str(state), **values}
    return subprocess.run(
        [sys.executable, "manage.py", *argv], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_uses_stored_settings(state: Path) -> None:
    done = command(state, "shell", "--no-imports", "-c", PRINT)
    assert (done.returncode, done.stdout.split()) == (0, ["redis://:word@127.0.0.1:20001/0", str(state)]), done.stderr
    assert done.stderr.splitlines()[0] == f"meshboard: using the settings of the board that `make up` stored in {state}"


def test_does_not_mix_stored_and_given_settings(state: Path) -> None:
    """A Redis without a secret key is an error."""
    done = command(state, "check", MESHBOARD_REDIS_URL="redis://127.0.0.1:1/0")
    assert done.returncode != 0
    assert done.stderr.splitlines()[1:] == ["MESHBOARD_SECRET_KEY is not set"]


def test_names_missing_settings_without_a_board(tmp_path: Path) -> None:
    done = command(tmp_path, "doctor")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "meshboard: invalid settings (see docs/howto/deploy.md):",
        "MESHBOARD_SECRET_KEY is not set",
        "MESHBOARD_REDIS_URL is not set",
    ]
