"""Commands of script jobs that can start, and the errors of others."""

from __future__ import annotations

from typing import Any

import pytest

from planner.facts.kinds import compute_slot_demand
from planner.facts.parse_spec import parse_spec
from planner.facts.validation import SpecError


def parse(command: str, **fields: Any) -> Any:
    spec = {"kind": "script", "name": "x", "layout": {"dp": 2}, "script": {"command": command}}
    return parse_spec({**spec, **fields})


@pytest.mark.parametrize(
    "command",
    [
        "torchrun train.py",
        "torchrun --nproc-per-node 2 train.py --lr 1e-3",
        "torchrun --nnodes=1 --nproc_per_node=gpu train.py",
        "python -m torch.distributed.run --nproc-per-node=2 train.py",
        "python -m torch.distributed.launch --use-env --nproc-per-node 2 train.py",
        "accelerate launch --num_processes 2 --num_machines 1 train.py",
        "deepspeed --num_gpus 2 train.py",
        "uv run torchrun train.py",
        "env X=1 torchrun train.py",
        "bash -c 'cd a && torchrun train.py > log'",
        "python train.py --name 'a; b' --pipe '|x'",
    ],
)
def test_command_of_a_launcher_is_valid(command: str) -> None:
    spec = parse(command)
    assert spec.script.command == command
    assert compute_slot_demand(spec).max_hosts == 1, "a command runs on one host"


@pytest.mark.parametrize(
    ("command", "fields", "field", "text"),
    [
        ("python 'train.py", {}, "script.command", "Close the quotation mark"),
        ("''", {}, "script.command", "is empty"),
        ("  ", {}, "script.command", "is empty"),
        ("X=1 torchrun train.py", {}, "script.command", "starts with 'X=1'. Put `env` before the variable."),
        ("cd a", {}, "script.command", "Use `bash -c '...'`"),
        ("torchrun train.py && echo done", {}, "script.command", "contains '&&', which only a shell can read"),
        ("torchrun train.py; ls", {}, "script.command", "which only a shell can read"),
        ("srun python train.py", {}, "script.command", "Use torchrun, accelerate, deepspeed, python, or bash."),
        ("/usr/bin/mpirun -n 2 python t.py", {}, "script.command", "processes can be outside of the job"),
        ("torchrun --nproc-per-node 4 t.py", {}, "layout.dp", "starts 4 ranks (`--nproc-per-node`). Use equal"),
        ("accelerate launch --num_processes=8 t.py", {}, "layout.dp", "starts 8 ranks"),
        ("torchrun --nnodes 2 t.py", {}, "script.command", "starts 2 nodes (`--nnodes`), but a command runs on one"),
        ("torchrun t.py", {"resources": {"max_hosts": 2}}, "resources.max_hosts", "a command runs on one host"),
        ("torchrun t.py", {"script": {"command": "x", "args": ["1"]}}, "script.args", "Omit one of them"),
        ("torchrun t.py", {"script": {"command": "x", "path": "t.py"}}, "script", "has path and command"),
        ("torchrun t.py", {"script": {"command": "x", "cwd": "../a"}}, "script.cwd", "outside the script root"),
        ("torchrun t.py", {"script": {"command": "x", "cwd": "."}}, "script.cwd", "that all users share"),
    ],
)
def test_reports_a_command_that_cannot_run(command: str, fields: Any, field: str, text: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse(command, **fields)
    found = {problem.field: problem.message for problem in refused.value.problems}
    assert text in found[field], found
