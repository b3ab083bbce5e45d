"""A script job whose command is the launcher of the user."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contracts.control import VERSION, LaunchOrder
from planner.facts.parse_spec import parse_spec
from tests.support.host import Host, run_host
from tests.support.processes import RedisServer
from webapp.runner import find_free_port

FAILING = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
weight = torch.nn.Parameter(torch.ones(8))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(6):
    weight.grad = torch.ones(8)
    dist.all_reduce(weight.grad)
    optimizer.step()
print("rank", dist.get_rank(), sys.argv[1:])
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError("the loss is wrong")
dist.destroy_process_group()
"""


@pytest.fixture
def host(redis_service: RedisServer, tmp_path: Path) -> Iterator[Host]:
    with run_host(redis_service, tmp_path / "host") as made:
        (made.folder / "scripts" / "own").mkdir(parents=True)
        with made.run_worker():
            yield made


def run_command(host: Host, job: str, command: str, source: str) -> Any:
    """Run a command in the folder of a script, and return its exit report."""
    (host.folder / "scripts" / "own" / "train.py").write_text(source)
    spec = {"kind": "script", "layout": {"dp": 2}, "script": {"command": command, "cwd": "own"}}
    order = LaunchOrder(
        v=VERSION, job=job, attempt=1, spec=parse_spec(spec).model_dump(), slots=[0, 1], expires=2**40, owner=1
    )
    host.send_order(order)
    host._ordered.append((job, 1))
    return host.wait_for_exit(job, 240)


def read_lines(host: Host, job: str, rank: int) -> list[str]:
    return [line for item in host.read_items(job, "log") if item["rank"] == rank for line in item["lines"]]


def test_torchrun_of_the_user_is_metered_and_its_failed_rank_is_named(host: Host) -> None:
    result = run_command(host, "own-torchrun", "env X=1 torchrun train.py 'two words'", FAILING)
    assert (result["outcome"], result["rank"]) == ("failed", 1), result
    assert "ValueError: the loss is wrong" in result["reason"]
    for rank in (0, 1):
        assert f"rank {rank} ['two words']" in read_lines(host, "own-torchrun", rank)
    cells = result["summary"]["cells"]
    for rank in ("0", "1"):
        reduced = [cell for cell in cells[rank] if cell["op"] == "all_reduce"]
        assert sum(cell["payload_bytes"] for cell in reduced) == 6 * 8 * 4


@pytest.mark.extended
def test_script_that_starts_its_own_ranks_is_metered(host: Host) -> None:
    source = Path(__file__).parents[1].joinpath("meter", "launched.py").read_text()
    result = run_command(host, "spawns", f"bash -c 'exec python train.py fork {find_free_port()}'", source)
    assert result["outcome"] == "succeeded", result
    assert set(result["summary"]["cells"]) == {"0", "1"}
    assert result["summary"]["steps"] == 8


@pytest.mark.extended
def test_unknown_program_is_reported(host: Host) -> None:
    result = run_command(host, "unknown", "no-such-program train.py", "")
    assert result["outcome"] == "failed"
    assert "`script.command` cannot start 'no-such-program': No such file or directory." in result["reason"]


@pytest.mark.extended
def test_command_without_a_metered_rank_is_reported(host: Host) -> None:
    result = run_command(host, "isolated", "python -I train.py", "print('trained')\n")
    assert result["outcome"] == "succeeded"
    assert result["reason"].startswith("the command finished. No rank is metered")
    assert "trained" in read_lines(host, "isolated", -1)
