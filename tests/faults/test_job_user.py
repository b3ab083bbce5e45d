"""A job's processes run as a user of their own, who reaches what is the job's and nothing of the host's."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.host import host
from tests.support.processes import RedisServer
from workers.host.settings import SettingError, host_settings

USER = "nobody"
ONE_RANK: dict[str, Any] = {"model": {"preset": "gpt-tiny"}, "train": {"steps": 1, "warmup_steps": 0}}

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may change user")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that another user may pass through; pytest's own is ours alone."""
    folder = Path(tempfile.mkdtemp(prefix="meshboard-test-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


def reachable_python(folder: Path) -> str:
    """This Python if others may run it, else the system's with our packages; ours may lie in root's home."""
    if os.stat(sys.executable).st_mode & 0o005 and all(
        parent.stat().st_mode & 0o001 for parent in Path(sys.executable).resolve().parents
    ):
        return sys.executable
    system = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    if not Path(system).exists():
        pytest.skip(f"others may not run {sys.executable}, and there is no {system}")
    subprocess.run([system, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (found,) = (folder / "venv/lib").glob("python*/site-packages")
    # redis wants this where Python is older than 3.11.3, and our packages are of a newer one.
    (found / "async_timeout.py").write_text("from asyncio import timeout as timeout\n")
    (found / "ours.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return str(folder / "venv/bin/python")


@needs_root
def test_a_jobs_processes_are_another_users_and_reach_nothing_of_the_hosts(
    redis_service: RedisServer, open_folder: Path
) -> None:
    settings = {"MESHBOARD_JOB_USER": USER, "MESHBOARD_SANDBOX": "off"}
    with contextlib.ExitStack() as entered:
        machine = entered.enter_context(host(redis_service, open_folder, "tests.workers.curious", **settings))
        machine.python = reachable_python(open_folder)
        entered.enter_context(machine.worker())
        spec = {**ONE_RANK, "train": {**ONE_RANK["train"], "checkpoint_every": 1}}
        attempt = machine.order("curious", spec=spec)
        report = machine.exit_of("curious")
        assert report["outcome"] == "succeeded", "\n".join(report["log_tail"])
        lines = [line for item in machine.items("curious", "log") for line in item["lines"]]
        (said,) = [line for line in lines if line.startswith("seen ")]
        seen = json.loads(said.removeprefix("seen "))
        user = pwd.getpwnam(USER)
        assert (seen["uid"], seen["gid"], set(seen["groups"])) == (user.pw_uid, user.pw_gid, {user.pw_gid})
        assert seen["home"] == seen["cwd"] == str(attempt.work)
        assert seen["privileges"] == ["NoNewPrivs:\t1"]
        assert seen["redis in sight"] is False
        assert seen["reads"] == []
        checkpoints = open_folder / "checkpoints"
        assert seen["writes"] == {
            str(attempt.work): True,
            str(checkpoints / "curious"): True,
            str(attempt.logs): True,
            str(attempt.given): False,
            str(attempt.run_dir): False,
            str(checkpoints): False,
        }
        assert machine.processes("curious") == []


@needs_root
@pytest.mark.parametrize(
    ("name", "why"), [("root", "must not be root"), ("no-such-user", "has no user 'no-such-user'")]
)
def test_a_user_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, why: str) -> None:
    monkeypatch.setenv("MESHBOARD_REDIS_URL", "redis://127.0.0.1:1/0")
    monkeypatch.setenv("MESHBOARD_HOST_KEY", "00")
    monkeypatch.setenv("MESHBOARD_JOB_USER", name)
    with pytest.raises(SettingError, match=why):
        host_settings()


def test_a_worker_that_is_not_root_cannot_promise_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHBOARD_REDIS_URL", "redis://127.0.0.1:1/0")
    monkeypatch.setenv("MESHBOARD_HOST_KEY", "00")
    monkeypatch.setenv("MESHBOARD_JOB_USER", USER)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(SettingError, match="only a host worker that is root"):
        host_settings()
