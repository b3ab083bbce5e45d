"""Scripts in bubblewrap."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.host import Host, run_host
from tests.support.processes import RedisServer
from workers.host.attempts import get_attempt_dir
from workers.host.settings import USER_PER_OWNER

WORKS = (
    shutil.which("bwrap") is not None
    and subprocess.run(["bwrap", "--ro-bind", "/", "/", "true"], capture_output=True, check=False).returncode == 0
)
pytestmark = pytest.mark.skipif(not WORKS, reason="bubblewrap does not work here")

SCRIPT = """
import ctypes, json, os, signal, socket, sys
from pathlib import Path

def tried(act):
    try:
        return act() is not False
    except OSError as error:
        return error.strerror

def write(path):
    return lambda: Path(path).write_text("mine")

def kill(pid):
    return lambda: os.kill(int(pid), signal.SIGKILL)

targets = json.loads(sys.argv[1])
seen = {f"read {path}": tried(Path(path).read_bytes) for path in targets["read"]}
seen |= {f"write {path}": tried(write(path)) for path in targets["write"]}
seen |= {f"kill {pid}": tried(kill(pid)) for pid in targets["kill"]}
seen["shared memory"] = ctypes.CDLL(None).shmget(targets["key"], 0, 0) >= 0
seen["uid"] = os.getuid()
told = ("MESHBOARD_ATTEMPT", "MESHBOARD_RUNS", "MESHBOARD_GROUP_TIMEOUT_S")
seen["settings"] = [name for name in os.environ if name.startswith("MESHBOARD_") and name not in told]
seen["processes"] = sorted(
    Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\\0")[2].decode()
    for pid in filter(str.isdigit, os.listdir("/proc")) if int(pid) != os.getpid()
)
Path("out").mkdir()
Path("out/model.bin").write_bytes(Path("corpus.txt").read_bytes())
socket.create_server(("127.0.0.1", 0)).close()
print("seen", json.dumps(seen), flush=True)
"""
SECRETS = ("up.json", "redis_password", "secret_key", "db.sqlite3")


@pytest.fixture
def shared_memory() -> Iterator[int]:
    """Create a System V shared memory segment that all users can attach to, and yield its key."""
    libc, key = ctypes.CDLL(None), 0x6D657368
    segment = libc.shmget(key, 4096, 0o1666)  # IPC_CREAT
    assert segment >= 0
    yield key
    libc.shmctl(segment, 0, None)  # IPC_RMID


@pytest.mark.parametrize("user", ["auto", pytest.param("none", marks=pytest.mark.slow)])
def test_script_in_bubblewrap_reaches_only_its_own_folders(
    redis_service: RedisServer, tmp_path: Path, user: str, shared_memory: int
) -> None:
    """Check files that all users can read. Only the sandbox hides them."""
    state = tmp_path / "state"
    state.mkdir()
    for name in SECRETS:
        (state / name).write_text("secret")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "key").write_text("secret")
    (tmp_path / "checkpoints" / "another").mkdir(parents=True)
    (tmp_path / "checkpoints" / "another" / "weights").write_text("secret")
    folder = tmp_path / "scripts" / "mine"
    folder.mkdir(parents=True)
    (tmp_path / "scripts" / "theirs").mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "corpus.txt").write_text("to be or not")
    settings = {
        "MESHBOARD_STATE_DIR": str(state),
        "HOME": str(tmp_path / "home"),
        "MESHBOARD_JOB_USER": user,
        "MESHBOARD_SANDBOX": "bwrap",
    }
    with run_host(redis_service, tmp_path, **settings) as machine, machine.run_worker() as worker:
        own = get_attempt_dir(machine.run_dir, "boxed", 1).host_dir
        theirs = [*(state / name for name in SECRETS), own / "order.json", tmp_path / "home" / "key"]
        theirs += [tmp_path / "checkpoints" / "another" / "weights", Path(f"/proc/{worker.pid}/environ")]
        places = [own, machine.run_dir, machine.data_root, folder.parent, folder.parent / "theirs", Path("/etc")]
        targets = {
            "read": list(map(str, theirs)),
            "write": [str(place / "exit.json") for place in places],
            "kill": [worker.pid],
            "key": shared_memory,
        }
        arguments = {"path": "mine/train.py", "args": [json.dumps(targets)]}
        spec: dict[str, Any] = {"kind": "script", "script": arguments, "layout": {"dp": 1}}
        machine.send_launch_order("boxed", spec=spec)
        report = machine.wait_for_exit("boxed")
        assert report["outcome"] == "succeeded", "\n".join([report["reason"], *report["log_tail"]])
        lines = [line for item in machine.read_items("boxed", "log") for line in item["lines"]]
        (output,) = [line for line in lines if line.startswith("seen ")]
        seen = json.loads(output.removeprefix("seen "))
        assert seen.pop("uid") == (USER_PER_OWNER.uid + 1 if user == "auto" and os.geteuid() == 0 else os.geteuid())
        assert seen.pop("settings") == []
        assert seen.pop("processes") == ["workers.host.guardian", "workers.host.launch"]
        assert {what for what, answer in seen.items() if answer is True} == set(), "it reached what is not its own"
        assert len(seen) == 1 + sum(len(paths) for paths in targets.values() if isinstance(paths, list))
        assert (folder / "out" / "model.bin").read_text() == "to be or not", "files in its working directory are kept"
        assert [path.read_text() for path in state.iterdir()] == ["secret"] * len(SECRETS)
        assert machine.list_processes("boxed") == []


INTRUDER = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore

soon = timedelta(seconds=3)
try:
    store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False, timeout=soon)
    store.set("mine", "written")
    print("reached", store.get("mine").decode(), flush=True)
except Exception as error:
    print("kept out", type(error).__name__, flush=True)
"""


def store_port(machine: Host, job: str) -> str:
    """Return the port of a job's rendezvous store."""
    for pid in machine.list_processes(job):
        found = re.search(rb"\0MASTER_PORT=([0-9]+)", Path(f"/proc/{pid}/environ").read_bytes())
        if found:
            return found[1].decode()
    return ""


@pytest.mark.slow
def test_script_cannot_reach_the_store_of_another_job(redis_service: RedisServer, tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "intruder.py").write_text(INTRUDER)
    settings = {"MESHBOARD_STATE_DIR": str(tmp_path / "state"), "MESHBOARD_SANDBOX": "bwrap"}
    with run_host(redis_service, tmp_path, **settings) as machine, machine.run_worker():
        machine.send_launch_order("victim")
        machine.wait_for_steps("victim", 2)
        script = {"path": "intruder.py", "args": [store_port(machine, "victim")]}
        machine.send_launch_order(
            "intruder", spec={"kind": "script", "script": script, "layout": {"dp": 1}}, first_slot=2, owner=2
        )
        machine.wait_for_exit("intruder")
        lines = [line for item in machine.read_items("intruder", "log") for line in item["lines"]]
        assert [line for line in lines if line.startswith(("reached", "kept out"))] == ["kept out DistNetworkError"]
        machine.wait_for_steps("victim", machine.read_items("victim", "step")[-1]["step"] + 1)
