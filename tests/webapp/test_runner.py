"""The one command, with wrong settings and a taken port; and Django's own deployment checks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT, base_environment
from webapp.runner import StartError, redis_port, wait_for_redis


def up(state: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {**base_environment(), "MESHBOARD_STATE_DIR": str(state), **settings}
    argv = [sys.executable, "-m", "webapp.runner"]
    return subprocess.run(argv, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_a_taken_port_is_told_and_nothing_is_started(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = up(tmp_path / "var", MESHBOARD_PORT=str(port))
    assert ended.returncode == 1
    assert f"MESHBOARD_PORT={port} is taken by another program" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_port_that_is_none_is_told(tmp_path: Path) -> None:
    for wrong in ("0", "65536", "-1", "http"):
        assert f"must be a port from 1 to 65535, got '{wrong}'" in up(tmp_path / "var", MESHBOARD_PORT=wrong).stderr


def test_a_redis_that_does_not_answer_is_told(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="Redis did not answer within 0 s"):
        wait_for_redis("redis://127.0.0.1:1/0", tmp_path, timeout_s=0.1)


def test_redis_keeps_its_port_and_says_so_when_it_cannot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = redis_port(tmp_path)
    assert redis_port(tmp_path) == port
    assert capsys.readouterr().out == ""
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", port))
        stranger.listen()
        moved = redis_port(tmp_path)
    said = capsys.readouterr().out
    assert f"Port {port}, where Redis was, is taken by another program; it moves to {moved}" in said
    assert redis_port(tmp_path) == moved != port


def test_the_deployment_checks_are_clean(tmp_path: Path) -> None:
    environment = {
        **base_environment(),
        "MESHBOARD_SECRET_KEY": "a" * 20 + "0123456789" * 5,
        "MESHBOARD_REDIS_URL": "redis://127.0.0.1:1/0",
        "MESHBOARD_STATE_DIR": str(tmp_path),
    }
    argv = [sys.executable, "manage.py", "check", "--deploy", "--fail-level", "WARNING"]
    done = subprocess.run(argv, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_missing_setting_is_named(tmp_path: Path) -> None:
    environment = {**base_environment(), "MESHBOARD_STATE_DIR": str(tmp_path)}
    argv = [sys.executable, "manage.py", "check"]
    done = subprocess.run(argv, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "MESHBOARD_" in done.stderr.splitlines()[-1]
    assert os.path.exists(ROOT / "docs" / "deploy.md")
