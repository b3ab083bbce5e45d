"""The separate user of a job's processes."""

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

from tests.support.host import Host, run_host
from tests.support.processes import RedisServer, wait_until
from workers.host.isolation import make_owned_folder
from workers.host.settings import USER_PER_OWNER, HostSettingError, read_host_settings

USER = "nobody"
ONE_RANK: dict[str, Any] = {"model": {"preset": "gpt-tiny"}, "train": {"steps": 1, "warmup_steps": 0}}

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may change user")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Return a temporary folder that other users can pass."""
    folder = Path(tempfile.mkdtemp(prefix="meshboard-test-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


def reachable_python(folder: Path) -> str:
    """Return a Python that other users can run, with the installed packages."""
    if os.stat(sys.executable).st_mode & 0o005 and all(
        parent.stat().st_mode & 0o001 for parent in Path(sys.executable).resolve().parents
    ):
        return sys.executable
    system = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    if not Path(system).exists():
        pytest.skip(f"others may not run {sys.executable}, and there is no {system}")
    subprocess.run([system, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (found,) = (folder / "venv/lib").glob("python*/site-packages")
    # redis requires async-timeout with Python before 3.11.3, and newer packages do not install it.
    (found / "async_timeout.py").write_text("from asyncio import timeout as timeout\n")
    (found / "ours.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return str(folder / "venv/bin/python")


@needs_root
def test_job_runs_as_another_user_without_access_to_the_host(redis_service: RedisServer, open_folder: Path) -> None:
    settings = {"MESHBOARD_JOB_USER": USER, "MESHBOARD_SANDBOX": "off"}
    with contextlib.ExitStack() as entered:
        machine = entered.enter_context(
            run_host(redis_service, open_folder, "tests.workers.inspecting_script", **settings)
        )
        machine.python = reachable_python(open_folder)
        entered.enter_context(machine.run_worker())
        spec = {**ONE_RANK, "train": {**ONE_RANK["train"], "checkpoint_every": 1}}
        attempt = machine.send_launch_order("curious", spec=spec)
        report = machine.wait_for_exit("curious")
        assert report["outcome"] == "succeeded", "\n".join(report["log_tail"])
        lines = [line for item in machine.read_items("curious", "log") for line in item["lines"]]
        (output,) = [line for line in lines if line.startswith("seen ")]
        seen = json.loads(output.removeprefix("seen "))
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
            str(attempt.job_dir): False,
            str(attempt.run_dir): False,
            str(checkpoints): False,
        }
        assert machine.list_processes("curious") == []


RUNNING = """
import signal, sys
from pathlib import Path
Path.home().joinpath("secret").write_text("mine")
Path("out.txt").write_text("mine")
print("there", flush=True)
signal.pause()
"""
NEIGHBOUR = """
import json, os, sys
from pathlib import Path

def tried(act):
    try:
        return act() is not False
    except OSError as error:
        return error.strerror

work, logs, script, checkpoints, cache = map(Path, sys.argv[1:])
print("tried", json.dumps({
    "read what it keeps": tried(lambda: (work / "secret").read_bytes()),
    "list what it keeps": tried(lambda: os.listdir(work)),
    "read its log": tried(lambda: os.listdir(logs)),
    "change what it made": tried(lambda: (script / "out.txt").write_text("evil")),
    "put a module beside its script": tried(lambda: (script / "torch.py").write_text("evil")),
    "spoil its checkpoints": tried(lambda: (checkpoints / "evil").write_text("evil")),
    "spoil its tokens": tried(lambda: (cache / "evil").write_text("evil")),
    "create a file in its own folder": tried(lambda: Path("out.txt").write_text("mine")),
}), flush=True)
"""


@needs_root
@pytest.mark.slow
def test_job_cannot_read_or_harm_a_job_of_another_owner(redis_service: RedisServer, open_folder: Path) -> None:
    """Check two owners without bubblewrap, who are isolated by their user IDs."""
    settings = {"MESHBOARD_JOB_USER": "owners", "MESHBOARD_SANDBOX": "off"}
    with contextlib.ExitStack() as entered:
        machine = entered.enter_context(run_host(redis_service, open_folder, **settings))
        machine.python = reachable_python(open_folder)
        for name, source in (("a", RUNNING), ("b", NEIGHBOUR)):
            (open_folder / "scripts" / name).mkdir(parents=True)
            (open_folder / "scripts" / name / "script.py").write_text(source)
        theirs = [open_folder / "checkpoints" / "first", machine.data_root / ".cache" / "65537"]
        for folder in theirs:
            make_owned_folder(
                folder, USER_PER_OWNER._replace(uid=65_537)
            )  # with the permissions of a training run of the first owner
        entered.enter_context(machine.run_worker())
        spec: dict[str, Any] = {"kind": "script", "layout": {"dp": 1}, "script": {"path": "a/script.py"}}
        first = machine.send_launch_order("first", spec=spec, owner=1)
        wait_until(lambda: "there" in lines_of(machine, "first"), "the first job runs")
        paths = [first.work, first.logs, open_folder / "scripts/a", *theirs]
        script = {"path": "b/script.py", "args": [str(path) for path in paths]}
        machine.send_launch_order("second", spec={**spec, "script": script}, owner=2, first_slot=1)
        report = machine.wait_for_exit("second")
        assert report["outcome"] == "succeeded", "\n".join([report["reason"], *report["log_tail"]])
        (output,) = [line for line in lines_of(machine, "second") if line.startswith("tried ")]
        result = json.loads(output.removeprefix("tried "))
        assert result.pop("create a file in its own folder") is True
        assert set(result.values()) == {"Permission denied"}, result


def lines_of(machine: Host, job: str) -> list[str]:
    return [line for item in machine.read_items(job, "log") for line in item["lines"]]


@needs_root
@pytest.mark.parametrize(
    ("name", "why"), [("root", "is root. Use another user"), ("no-such-user", "this machine has no such user")]
)
def test_rejects_an_invalid_job_user(monkeypatch: pytest.MonkeyPatch, name: str, why: str) -> None:
    monkeypatch.setenv("MESHBOARD_REDIS_URL", "redis://127.0.0.1:1/0")
    monkeypatch.setenv("MESHBOARD_HOST_KEY", "00")
    monkeypatch.setenv("MESHBOARD_JOB_USER", name)
    with pytest.raises(HostSettingError, match=why):
        read_host_settings()


def test_worker_without_root_rejects_another_job_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHBOARD_REDIS_URL", "redis://127.0.0.1:1/0")
    monkeypatch.setenv("MESHBOARD_HOST_KEY", "00")
    monkeypatch.setenv("MESHBOARD_JOB_USER", USER)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(HostSettingError, match="only a worker that runs as root"):
        read_host_settings()
