"""Parsing a launcher's command line."""

from __future__ import annotations

import pytest
from torch.distributed.run import get_args_parser

from workers.external_runs.command_line import CommandError, LaunchPlan, _make_torchrun_parser, parse_command

LOGS = {"PET_LOG_DIR": "/logs", "PET_TEE": "3"}


def launch(*argv: str, **environment: str) -> LaunchPlan:
    return parse_command(list(argv), environment, "/logs", lambda: 8)


def test_options_match_torchrun() -> None:
    expected = {
        (tuple(sorted(a.option_strings)), a.nargs)
        for a in get_args_parser()._actions
        if "--help" not in a.option_strings
    }
    actual = {(tuple(sorted(a.option_strings)), a.nargs) for a in _make_torchrun_parser()._actions}
    assert actual == expected


@pytest.mark.parametrize(
    "argv",
    [
        ["--nproc-per-node", "4", "train.py", "--lr", "1"],
        ["--nproc_per_node=4", "train.py"],
        ["--standalone", "--nproc-per-node", "4", "train.py", "-m", "x"],
        ["-m", "--nproc-per-node", "4", "pkg.train", "--nnodes", "7"],
        ["--nproc-per-node", "4", "-m", "workers.meter", "train.py"],
        ["--nproc-per-node", "4", "--no-python", "train"],
    ],
)
@pytest.mark.parametrize(
    "launcher",
    [
        ["torchrun"],
        ["/opt/bin/torchrun"],
        ["python3", "-u", "-m", "torch.distributed.run"],
        ["python", "-m", "torch.distributed.launch", "--use-env"],
        ["env", "X=1", "torchrun"],
        ["uv", "run", "--no-project", "torchrun"],
        ["timeout", "60", "nice", "-n", "5", "python3.11", "-m", "torch.distributed.run"],
    ],
)
def test_leaves_the_command_unchanged(launcher: list[str], argv: list[str]) -> None:
    command = [*launcher, *argv]
    assert launch(*command) == LaunchPlan(command, 1, 4, 0, LOGS)


@pytest.mark.parametrize("own", [["--log-dir", "mine"], ["-r", "3"], ["--tee=1"]])
def test_keeps_log_options_of_the_user(own: list[str]) -> None:
    made = launch("torchrun", *own, "train.py")
    assert made.argv == ["torchrun", *own, "train.py"]
    assert not made.log_variables


@pytest.mark.parametrize(
    ("argv", "environment", "nodes", "ranks", "node"),
    [
        (["--nproc-per-node", "gpu", "t.py"], {}, 1, 8, 0),
        (["--nproc-per-node", "4", "t.py"], {"SLURM_NODEID": "3"}, 1, 4, 0),
        (["t.py"], {"PET_NPROC_PER_NODE": "3", "PET_NNODES": "2", "PET_NODE_RANK": "1"}, 2, 3, 1),
        (["--nnodes", "2:2", "--nproc-per-node", "4", "t.py"], {"SLURM_NODEID": "1"}, 2, 4, 1),
        (["--nnodes", "2", "--node-rank", "1", "t.py"], {"SLURM_NODEID": "0"}, 2, 1, 1),
        (["--nnodes", "2", "t.py"], {}, 2, 1, None),
    ],
)
def test_computes_the_number_of_ranks(
    argv: list[str], environment: dict[str, str], nodes: int, ranks: int, node: int | None
) -> None:
    made = launch("torchrun", *argv, **environment)
    assert (made.nodes, made.ranks, made.node) == (nodes, ranks, node)


@pytest.mark.parametrize(
    "argv",
    [
        ["python", "train.py", "-m"],
        ["python3.11", "-u", "-m", "pkg"],
        ["python", "-c", "1"],
        ["srun", "python", "t.py"],
        ["deepspeed", "t.py"],
        ["python3", "-u", "-m", "accelerate.commands.launch", "t.py"],
        ["accelerate", "launch", "--num_processes", "2", "t.py"],
        ["bash", "-c", "torchrun --nproc-per-node 2 t.py"],
        ["bash", "torchrun", "t.py"],
    ],
)
def test_ranks_of_other_commands_report_their_number(argv: list[str]) -> None:
    assert launch(*argv) == LaunchPlan(argv, 1, None, None, {})


def test_command_around_each_rank_is_one_rank() -> None:
    argv = ["python", "train.py"]
    assert launch(*argv, RANK="2", WORLD_SIZE="4") == LaunchPlan(argv, 4, 1, 2, {})


@pytest.mark.parametrize(
    "argv", [[], ["--nnodes", "0", "t.py"], ["--nnodes", "1:4", "t.py"], ["--nproc-per-node", "x", "t"]]
)
def test_rejects_options_that_torchrun_rejects(argv: list[str]) -> None:
    with pytest.raises(CommandError):
        launch("torchrun", *argv)
