"""Programs of jobs: argv without text from users, the heap of CPU ranks, and project variables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from torch.distributed.run import parse_args

from contracts.control import VERSION, LaunchOrder
from contracts.security import encrypt_variables
from planner.cost.estimate import get_default_cluster, get_rank_memory
from planner.facts.parse_spec import parse_spec
from planner.facts.spec import JobKind
from tests.support.host import Host, run_host
from tests.support.processes import ROOT, RedisServer, base_environment, scale_timeout
from workers.host import doctor
from workers.host.attempts import AttemptDir, claim_attempt
from workers.host.job_limits import JobLimits
from workers.host.launch import parse_options
from workers.host.programs import (
    PROGRAMS,
    build_launch_command,
    build_rank_command,
    find_jemalloc,
    get_heap_variables,
    get_program,
)
from workers.host.settings import HostSettings
from workers.host.supervisor.torchrun_process import TorchrunProcess

OPTIONS = ["--root=/", "-m", "--", "-c", "--rdzv-endpoint=0.0.0.0:1", "--no-python", "; id"]
TELLS = "import json, os, sys\nfrom {own} import WORD\nprint(json.dumps([WORD, __file__, os.getcwd(), sys.argv[1:]]))\n"
KEPT = """
from pathlib import Path
from workers.trainer.memory import release_free_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

before = resident()
blocks = [bytearray(2**20) for _ in range(64)]
del blocks
print(resident() - before)
release_free_memory()
print(resident() - before)
"""
KEY = bytes(32)  # tests.support.host gives it
SECRET = "not-to-be-seen-7f3a"
LOOK = """
import json, os
print(json.dumps({name: os.environ.get(name) for name in ("HF_TOKEN", "PYTHONPATH", "MESHBOARD_HOST_KEY")}), flush=True)
"""
SPEC = {
    "kind": "script",
    "name": "look",
    "layout": {"dp": 1},
    "train": {"global_batch": 1},
    "script": {"path": "look.py"},
}


def settings(folder: Path) -> HostSettings:
    return HostSettings(
        redis_url="",
        name="here",
        slots=2,
        device="cpu",
        run_dir=folder / "runs",
        data_root=folder / "data",
        checkpoint_root=folder / "checkpoints",
        script_root=folder / "scripts",
        trainer_module="workers.trainer",
    )


def claimed(folder: Path, spec: dict[str, Any]) -> tuple[LaunchOrder, AttemptDir]:
    order = LaunchOrder(v=VERSION, job="-m", attempt=1, spec=spec, slots=[0, 1])
    attempt = claim_attempt(folder / "runs", order)
    assert attempt is not None
    return order, attempt


def hostile(kind: str, text: str) -> dict[str, Any]:
    """Return a spec in which every text is `text`."""
    return {
        "kind": kind,
        "name": text,
        "train": {"data": text, "column": text, "tokenizer": text, "resume": text},
        "script": {"path": text, "args": [text, text]},
        "resources": {"device": "cpu", "host": text},
        "model": {"preset": text},
    }


@pytest.mark.parametrize("kind", get_args(JobKind))
def test_argv_contains_no_text_from_users(tmp_path: Path, kind: JobKind) -> None:
    order, attempt = claimed(tmp_path, hostile(kind, "USERS-TEXT"))
    command = build_launch_command(order, attempt, settings(tmp_path), "/run/telemetry")
    assert not [word for word in command if "USERS-TEXT" in word]
    assert command[:3] == [sys.executable, "-m", "workers.host.launch"]
    read = parse_options(command[3:])
    assert (read.module, read.ranks, read.name) == (PROGRAMS[kind].module(settings(tmp_path)), 2, "-m")
    assert all(word.startswith("--") and "=" in word for word in read.arguments)
    assert "--job=-m" in read.arguments


def test_torchrun_finds_no_option_in_a_rank_command(tmp_path: Path) -> None:
    """Parse the command with torchrun's parser, although the launcher does not use it."""
    plain = parse_args(["--nproc-per-node=2", "-m", "script"])
    result = {}
    for kind in get_args(JobKind):
        order, attempt = claimed(tmp_path / kind, {**hostile(kind, OPTIONS[4]), "script": {"args": OPTIONS}})
        command = build_rank_command(order, attempt, settings(tmp_path), "/run/telemetry")
        result[kind] = (command, parse_args(["--nproc-per-node=2", "-m", *command]))
    for kind, (command, read) in result.items():
        assert [read.training_script, *read.training_script_args] == command, kind
        rest = {name: value for name, value in vars(read).items() if not name.startswith("training_script")}
        assert rest == {name: vars(plain)[name] for name in rest}, kind
    assert parse_args([OPTIONS[4], "-m", "script"]).rdzv_endpoint == "0.0.0.0:1", "before the script it would obey"
    by_hand = parse_args(["-m", "workers.meter", "train.py", *OPTIONS])
    assert (by_hand.rdzv_endpoint, by_hand.training_script_args) == ("", ["train.py", *OPTIONS])


def test_each_kind_has_a_program_and_train_is_the_default() -> None:
    assert set(PROGRAMS) == set(get_args(JobKind))
    result = {kind: program.success_reason.format(steps=7, ranks="1 rank") for kind, program in PROGRAMS.items()}
    assert result["train"] == "finished after step 7"
    assert result["dry_run"] == "ran one step of 1 rank"
    assert len(set(result.values())) == len(PROGRAMS)
    plain = LaunchOrder(v=VERSION, job="job", attempt=1, spec={}, slots=[0])
    assert get_program(plain) is PROGRAMS["train"]


def start(folder: Path, arguments: list[str], **script: str) -> subprocess.CompletedProcess[str]:
    """Start one rank of a script job as torchrun does."""
    spec = {"kind": "script", "script": {**script, "args": arguments}}
    order, attempt = claimed(folder, spec)
    command = build_rank_command(order, attempt, settings(folder), str(folder / "nobody-listens"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "0", "WORLD_SIZE": "1"}
    argv = [sys.executable, "-u", "-m", *command]
    return subprocess.run(
        argv, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=scale_timeout(60)
    )


def test_path_that_looks_like_an_option_stays_a_path(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "outside.py").write_text("print('I RAN')\n")
    ran = start(tmp_path, [str(tmp_path / "outside.py"), "outside.py"], path="--root=/")
    assert ran.returncode == 2
    assert "I RAN" not in ran.stdout
    assert "`script.path` is '--root=/', which starts with '-', like a command-line option" in ran.stderr


@pytest.mark.parametrize(
    ("script", "lent"),
    [
        ({"path": "mine/train.py"}, "mine"),
        ({"path": "mine/train.py", "cwd": "mine/out"}, "mine/out"),
        ({"path": "link.py"}, "mine"),
        ({"module": "mine.train", "cwd": "mine/out"}, "mine/out"),
        ({"path": "mine/train.py", "cwd": "."}, None),
        ({"path": "mine/train.py", "cwd": "yours"}, None),
        ({"path": "mine/train.py", "cwd": "mine/to-yours"}, None),
        ({"module": "mine.train"}, None),
        ({"module": "mine.train", "cwd": "."}, None),
        ({"module": "mine.train", "cwd": "yours"}, None),
        ({"module": "top", "cwd": "yours"}, None),
        ({"path": "top.py"}, None),
        ({"path": "top.py", "cwd": "yours"}, None),
        ({"command": "python train.py", "cwd": "mine/out"}, "mine/out"),
        ({"command": "python train.py", "cwd": "mine/to-yours"}, None),
        ({"command": "python train.py", "cwd": "."}, None),
        ({"command": "python train.py"}, None),
    ],
)
def test_script_can_write_only_to_its_own_folder(tmp_path: Path, script: dict[str, str], lent: str | None) -> None:
    root = tmp_path / "scripts"
    for folder in ("mine/out", "yours"):
        (root / folder).mkdir(parents=True)
    for file in ("mine/train.py", "yours/train.py", "top.py"):
        (root / file).touch()
    (root / "mine/to-yours").symlink_to(root / "yours")
    (root / "link.py").symlink_to(root / "mine/train.py")
    order = LaunchOrder(v=VERSION, job="a", attempt=1, spec={"kind": "script", "script": script}, slots=[0])
    folders = get_program(order).folders(settings(tmp_path), order)
    assert folders.shared == (() if lent is None else (root / lent,))


def test_script_runs_in_its_folder_with_unchanged_arguments(tmp_path: Path) -> None:
    own = tmp_path / "scripts/own"
    own.mkdir(parents=True)
    (own / "beside.py").write_text("WORD = 'beside'\n")
    (own / "-m").write_text(TELLS.format(own="beside"))
    ran = start(tmp_path, OPTIONS, path="own/-m")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == ["beside", str(own / "-m"), str(own), OPTIONS]


def test_module_runs_in_the_requested_directory(tmp_path: Path) -> None:
    package = tmp_path / "scripts/package"
    package.mkdir(parents=True)
    (tmp_path / "scripts/data").mkdir()
    (package / "__init__.py").touch()
    (package / "beside.py").write_text("WORD = 'relative'\n")
    (package / "train.py").write_text(TELLS.format(own=".beside"))
    ran = start(tmp_path, ["--lr", "1"], module="package.train", cwd="data")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == [
        "relative",
        str(package / "train.py"),
        str(tmp_path / "scripts/data"),
        ["--lr", "1"],
    ]


def _environment(folder: Path, kind: str, device: str) -> dict[str, str]:
    settings = HostSettings("", "here", 1, device, *(folder / name for name in "rdcs"), "workers.trainer")  # type: ignore[call-arg]
    order = LaunchOrder(v=VERSION, job="job", attempt=1, spec={"kind": kind}, slots=[0])
    attempt = claim_attempt(settings.run_dir, order)
    assert attempt is not None
    return TorchrunProcess(
        attempt, order, settings, str(folder / "nobody-listens"), JobLimits(attempt, settings, has_own_user=False)
    )._build_environment()


@pytest.mark.parametrize(
    ("kind", "device", "actual"),
    [("train", "cpu", True), ("calibrate", "cpu", True), ("script", "cpu", False), ("train", "cuda", False)],
)
def test_only_cpu_ranks_of_own_programs_get_jemalloc(tmp_path: Path, kind: str, device: str, actual: bool) -> None:
    """Check that scripts and GPU ranks do not get jemalloc."""
    environment, options = _environment(tmp_path, kind, device), get_heap_variables()
    assert find_jemalloc() is not None, "the tests' tools are not installed: make tools"
    assert {name: environment.get(name) for name in options} == (options if actual else dict.fromkeys(options))


def test_host_without_jemalloc_starts_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.host.programs.find_jemalloc", lambda: None)
    assert "LD_PRELOAD" not in _environment(tmp_path, "train", "cpu")


def test_doctor_reports_missing_jemalloc(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._check_heap().level == "ok"
    monkeypatch.setattr(doctor, "find_jemalloc", lambda: None)
    found = doctor._check_heap()
    assert (found.level, found.advice) == ("warn", "apt-get install libjemalloc2, and restart the worker")


def test_jemalloc_keeps_freed_pages() -> None:
    """Check that the tensors of the next step cause no page faults."""
    environment = {**base_environment(), **get_heap_variables()}
    argv = [sys.executable, "-c", KEPT]
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    stored, left = (int(line) / 2**20 for line in done.stdout.split())
    assert stored > 60
    assert left < 4


@pytest.mark.slow
def test_memory_of_a_run_matches_the_plan(redis_service: RedisServer, tmp_path: Path) -> None:
    """Check tensors of 2 and 5.5 MiB, which take 1.4 to 1.5 times as much memory in glibc's heap."""
    spec = parse_spec(
        {
            "model": {"preset": "llama-mini"},
            "layout": {"dp": 2},
            "train": {"global_batch": 16, "micro_batches": 2, "seq_len": 512, "steps": 3, "eval_every": 0},
        }
    )
    with run_host(redis_service, tmp_path / "host") as made, made.run_worker():
        made.send_launch_order("held", spec=spec.model_dump(), expires_in_s=600)
        assert made.wait_for_exit("held", 600)["outcome"] == "succeeded"
        peaks = [item["peak_bytes"] for item in made.read_items("held", "verdict")]
    parts = get_rank_memory(spec, 0, get_default_cluster(spec))
    planned = sum(parts.values()) - get_default_cluster(spec).accelerator.reserved_bytes
    assert len(peaks) == 2
    assert all(0.85 * planned < peak < 1.15 * planned for peak in peaks), (peaks, planned)


@pytest.fixture
def running_host(redis_service: RedisServer, tmp_path: Path) -> Iterator[Host]:
    with run_host(redis_service, tmp_path / "host") as made:
        scripts = made.folder / "scripts"
        scripts.mkdir()
        (scripts / "look.py").write_text(LOOK)
        with made.run_worker():
            yield made


def ordered(made: Host, job: str, sealed: list[str]) -> Any:
    spec = parse_spec(SPEC).model_dump()
    order = LaunchOrder(v=VERSION, job=job, attempt=1, spec=spec, slots=[0], expires=2**40, owner=1, variables=sealed)
    made.send_order(order)
    made._ordered.append((job, 1))
    return made.wait_for_exit(job)


def test_project_variables_reach_the_job_and_no_host_file(running_host: Host) -> None:
    names = {"HF_TOKEN": SECRET}
    result = ordered(running_host, "sees", encrypt_variables([bytes([1] * 32), KEY], "sees", 1, names))
    assert result["outcome"] == "succeeded", result
    lines = [line for item in running_host.read_items("sees", "log") for line in item["lines"]]
    seen = next(json.loads(line) for line in lines if line.startswith('{"HF_TOKEN"'))
    assert seen["HF_TOKEN"] == SECRET
    assert seen["MESHBOARD_HOST_KEY"] is None
    own = [path for path in running_host.run_dir.rglob("*") if path.is_file() and "logs" not in path.parts]
    assert any(path.name == "order.json" for path in own)
    assert [path for path in own if SECRET.encode() in path.read_bytes()] == []
    broken = ordered(running_host, "another", encrypt_variables([KEY], "sees", 1, names))
    assert broken["outcome"] == "failed"
    assert (
        "cannot decrypt the variables of the project: the variables were encrypted for another attempt"
        in broken["reason"]
    )
