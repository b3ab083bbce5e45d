"""Parsing a launcher's command line, and inserting the meter."""

from __future__ import annotations

import pytest
from torch.distributed.run import get_args_parser

from workers.external_runs.command_line import CommandError, LaunchPlan, _make_torchrun_parser, parse_command

OURS = ["--log-dir", "/logs", "--tee", "3"]
METER = ["-m", "workers.meter"]


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
    ("argv", "after"),
    [
        (
            ["--nproc-per-node", "4", "train.py", "--lr", "1"],
            ["--nproc-per-node", "4", *METER, "train.py", "--lr", "1"],
        ),
        (["--nproc_per_node=4", "train.py"], ["--nproc_per_node=4", *METER, "train.py"]),
        (["--standalone", "train.py", "-m", "x"], ["--standalone", *METER, "train.py", "-m", "x"]),
        (["-m", "pkg.train", "--lr", "1"], ["-m", "workers.meter", "-m", "pkg.train", "--lr", "1"]),
        (["--module", "--nnodes", "1", "pkg"], ["--module", "--nnodes", "1", "workers.meter", "-m", "pkg"]),
        (["train.py", "--", "x"], [*METER, "train.py", "--", "x"]),
        (["train.py", "--nnodes", "7"], [*METER, "train.py", "--nnodes", "7"]),
    ],
)
@pytest.mark.parametrize(
    "launcher", [["torchrun"], ["/opt/bin/torchrun"], ["python3", "-u", "-m", "torch.distributed.run"]]
)
def test_inserts_the_meter_before_the_script(launcher: list[str], argv: list[str], after: list[str]) -> None:
    made = launch(*launcher, *argv)
    assert made.argv == [*launcher, *OURS, *after]
    assert (made.metered, made.separate_logs, made.nodes, made.node) == (True, True, 1, 0)


@pytest.mark.parametrize(
    "argv",
    [["-m", "workers.meter", "train.py", "--lr", "1"], ["--module", "workers.meter", "-m", "pkg.train"]],
)
def test_does_not_insert_a_second_meter(argv: list[str]) -> None:
    """Check `torchrun -m workers.meter train.py`, which a user can write."""
    made = launch("torchrun", "--nproc-per-node", "2", *argv)
    assert made.argv == ["torchrun", *OURS, "--nproc-per-node", "2", *argv]
    assert (made.metered, made.ranks) == (True, 2)
    made = launch("python3", "-u", *METER, "train.py")
    assert (made.argv, made.metered) == (["python3", "-u", *METER, "train.py"], True)


@pytest.mark.parametrize("own", [["--log-dir", "mine"], ["-r", "3"], ["--tee=1"]])
def test_keeps_log_options_of_the_user(own: list[str]) -> None:
    made = launch("torchrun", *own, "train.py")
    assert made.argv == ["torchrun", *own, *METER, "train.py"]
    assert not made.separate_logs


@pytest.mark.parametrize("option", ["--no-python", "--run-path"])
def test_does_not_meter_a_program_that_is_not_python(option: str) -> None:
    made = launch("torchrun", option, "train")
    assert made.argv == ["torchrun", *OURS, option, "train"]
    assert not made.metered


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
    ("argv", "after"),
    [
        (["python", "train.py", "-m"], ["python", *METER, "train.py", "-m"]),
        (["python3.11", "-u", "-X", "dev", "-m", "pkg"], ["python3.11", "-u", "-X", "dev", *METER, "-m", "pkg"]),
        (["/v/bin/python", "-W", "error", "t.py"], ["/v/bin/python", "-W", "error", *METER, "t.py"]),
    ],
)
def test_plain_python_is_one_rank(argv: list[str], after: list[str]) -> None:
    made = launch(*argv)
    assert (made.argv, made.nodes, made.ranks, made.node, made.separate_logs) == (after, 1, 1, 0, False)
    alone = launch(*argv, RANK="2", WORLD_SIZE="4")
    assert (alone.nodes, alone.ranks, alone.node) == (4, 1, 2)


@pytest.mark.parametrize(
    "argv",
    [
        ["python", "-c", "1"],
        ["python"],
        ["srun", "python", "t.py"],
        ["deepspeed", "t.py"],
        ["python", "-m", "torch.distributed.launch", "--use-env", "t.py"],
        ["python3", "-u", "-m", "accelerate.commands.launch", "t.py"],
    ],
)
def test_does_not_change_other_commands(argv: list[str]) -> None:
    assert launch(*argv) == LaunchPlan(argv, 1, 1, 0, metered=False, separate_logs=False)


@pytest.mark.parametrize(
    "argv", [[], ["--nnodes", "0", "t.py"], ["--nnodes", "1:4", "t.py"], ["--nproc-per-node", "x", "t"]]
)
def test_rejects_options_that_torchrun_rejects(argv: list[str]) -> None:
    with pytest.raises(CommandError):
        launch("torchrun", *argv)
