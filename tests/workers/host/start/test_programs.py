"""What a job starts on its ranks: a program for each kind, and never a word of the user's as an option."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from torch.distributed.run import parse_args

from contracts.control import VERSION, LaunchOrder
from planner.facts.spec import JobKind
from tests.support.patience import patient
from workers.host.attempts import AttemptDir
from workers.host.settings import HostSettings
from workers.host.start.claims import claim
from workers.host.start.launch import read_options
from workers.host.start.programs import PROGRAMS, launch_command, program_of, rank_command

ROOT = Path(__file__).resolve().parents[4]
OPTIONS = ["--root=/", "-m", "--", "-c", "--rdzv-endpoint=0.0.0.0:1", "--no-python", "; id"]


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
    attempt = claim(folder / "runs", order)
    assert attempt is not None
    return order, attempt


def hostile(kind: str, text: str) -> dict[str, Any]:
    """A spec whose every text is `text`."""
    return {
        "kind": kind,
        "name": text,
        "train": {"data": text, "column": text, "tokenizer": text, "resume": text},
        "script": {"path": text, "args": [text, text]},
        "resources": {"device": "cpu", "host": text},
        "model": {"preset": text},
    }


@pytest.mark.parametrize("kind", get_args(JobKind))
def test_no_text_of_the_users_is_in_an_argv(tmp_path: Path, kind: JobKind) -> None:
    order, attempt = claimed(tmp_path, hostile(kind, "USERS-TEXT"))
    command = launch_command(order, attempt, settings(tmp_path), "/run/telemetry", tmp_path / "failure.json")
    assert not [word for word in command if "USERS-TEXT" in word]
    assert command[:3] == [sys.executable, "-m", "workers.host.start.launch"]
    read = read_options(command[3:])
    assert (read.module, read.ranks, read.name) == (PROGRAMS[kind].module(settings(tmp_path)), 2, "-m")
    assert all(word.startswith("--") and "=" in word for word in read.arguments)
    assert "--job=-m" in read.arguments


def test_torchrun_s_own_parser_finds_no_option_in_what_a_rank_runs(tmp_path: Path) -> None:
    """Ours starts ranks by torch's library and parses no such line; were it given to torchrun, nothing would change."""
    plain = parse_args(["--nproc-per-node=2", "-m", "script"])
    told = {}
    for kind in get_args(JobKind):
        order, attempt = claimed(tmp_path / kind, {**hostile(kind, OPTIONS[4]), "script": {"args": OPTIONS}})
        command = rank_command(order, attempt, settings(tmp_path), "/run/telemetry")
        told[kind] = (command, parse_args(["--nproc-per-node=2", "-m", *command]))
    for kind, (command, read) in told.items():
        assert [read.training_script, *read.training_script_args] == command, kind
        rest = {name: value for name, value in vars(read).items() if not name.startswith("training_script")}
        assert rest == {name: vars(plain)[name] for name in rest}, kind
    assert parse_args([OPTIONS[4], "-m", "script"]).rdzv_endpoint == "0.0.0.0:1", "before the script it would obey"
    by_hand = parse_args(["-m", "workers.meter", "train.py", *OPTIONS])
    assert (by_hand.rdzv_endpoint, by_hand.training_script_args) == ("", ["train.py", *OPTIONS])


def test_each_kind_has_its_program_and_a_job_without_one_trains() -> None:
    assert set(PROGRAMS) == set(get_args(JobKind))
    told = {kind: program.good_end.format(steps=7, tried="1 rank") for kind, program in PROGRAMS.items()}
    assert told["train"] == "finished after step 7"
    assert told["dry_run"] == "ran one step of 1 rank"
    assert len(set(told.values())) == len(PROGRAMS)
    plain = LaunchOrder(v=VERSION, job="job", attempt=1, spec={}, slots=[0])
    assert program_of(plain) is PROGRAMS["train"]


def start(folder: Path, arguments: list[str], **script: str) -> subprocess.CompletedProcess[str]:
    """One rank of a script job, as torchrun starts it."""
    spec = {"kind": "script", "script": {**script, "args": arguments}}
    order, attempt = claimed(folder, spec)
    command = rank_command(order, attempt, settings(folder), str(folder / "nobody-listens"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "0", "WORLD_SIZE": "1"}
    argv = [sys.executable, "-u", "-m", *command]
    return subprocess.run(
        argv, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=patient(60)
    )


def test_a_path_that_looks_like_an_option_is_none(tmp_path: Path) -> None:
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
    ],
)
def test_a_script_may_write_to_its_own_folder_and_never_to_the_root_or_to_another_s(
    tmp_path: Path, script: dict[str, str], lent: str | None
) -> None:
    root = tmp_path / "scripts"
    for folder in ("mine/out", "yours"):
        (root / folder).mkdir(parents=True)
    for file in ("mine/train.py", "yours/train.py", "top.py"):
        (root / file).touch()
    (root / "mine/to-yours").symlink_to(root / "yours")
    (root / "link.py").symlink_to(root / "mine/train.py")
    order = LaunchOrder(v=VERSION, job="a", attempt=1, spec={"kind": "script", "script": script}, slots=[0])
    folders = program_of(order).folders(settings(tmp_path), order)
    assert folders.lent == (() if lent is None else (root / lent,))


TELLS = "import json, os, sys\nfrom {own} import WORD\nprint(json.dumps([WORD, __file__, os.getcwd(), sys.argv[1:]]))\n"


def test_a_script_runs_in_its_own_folder_with_its_arguments_as_they_were_written(tmp_path: Path) -> None:
    own = tmp_path / "scripts/own"
    own.mkdir(parents=True)
    (own / "beside.py").write_text("WORD = 'beside'\n")
    (own / "-m").write_text(TELLS.format(own="beside"))
    ran = start(tmp_path, OPTIONS, path="own/-m")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == ["beside", str(own / "-m"), str(own), OPTIONS]


def test_a_module_runs_in_the_directory_asked_for(tmp_path: Path) -> None:
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
