"""Failures of one rank and full disks are reported to all ranks, and training continues."""

from __future__ import annotations

import errno
import json
import pickle
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from tests.workers.checkpoint.runs import Ran, make_spec, run
from workers.checkpoint.coordination import (
    CheckpointDiskFullError,
    format_error,
    report_disk_full,
    run_on_every_rank,
    run_on_first_rank,
)
from workers.checkpoint.folder import list_complete
from workers.trainer.errors import UserError

STAGES = {"prepare": 0, "plan": 1, "write": 1, "metadata": 0, "describe": 1, "rename": 0}  # and the rank it fails on
LAST = len(STAGES) + 2
ONE_AND_A_HALF = "size=4400k"  # checkpoints of the model below


def faulty(root: Path, faults: dict[str, Any], steps: int, attempt: int) -> Ran:
    spec = make_spec({"dp": 2}, checkpoint_every=1, keep_checkpoints=10, steps=steps, micro_batches=1, seq_len=8)
    return run(spec, root, attempt=attempt, module="tests.workers.checkpoint.failing_saves", FAULTS=json.dumps(faults))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faulty") / "root"


@pytest.fixture(scope="module")
def saved(root: Path) -> Ran:
    """Run a job in which each step has a different failing stage."""
    return faulty(root, {stage: [rank, 2 + at] for at, (stage, rank) in enumerate(STAGES.items())}, LAST, 1)


def test_training_continues_and_each_problem_names_its_rank(saved: Ran, root: Path) -> None:
    assert sorted(saved.losses) == list(range(1, LAST + 1))
    result = {item["step"]: (item["name"], item["problem"]) for item in saved.of_kind("checkpoint")}
    assert sorted(result) == sorted(saved.losses)
    for at, (stage, rank) in enumerate(STAGES.items()):
        name, problem = result[2 + at]
        on_disk = "" if stage == "plan" else f"No disk space on {socket.gethostname()}: "  # a plan is made without one
        assert (name, problem.split(", ")[0].partition(" needs ")[0]) == (
            None,
            f"rank {rank}: {on_disk}No space left on device: /{stage}",
        )
        assert problem.endswith(" bytes are free") == bool(on_disk)
    assert [result[step][1] for step in (1, LAST)] == ["", ""]
    assert [checkpoint.step for checkpoint in list_complete(root)] == [1, LAST]
    assert list(root.glob("**/.step-*.draft")) == [], "nothing half written stays"


def test_training_continues_without_memory_for_a_copy(tmp_path: Path) -> None:
    ran = faulty(tmp_path / "root", {"room": [1, 0]}, 2, 1)
    assert sorted(ran.losses) == [1, 2]
    assert ran.problem is None
    words = "rank 1: No space left on device: /room"
    assert [(item["name"], item["problem"]) for item in ran.of_kind("checkpoint")] == [(None, words)] * 2


@pytest.mark.usefixtures("saved")
@pytest.mark.slow
def test_all_ranks_skip_a_checkpoint_that_one_rank_cannot_read(root: Path) -> None:
    """Load the same checkpoint on both ranks, or fail with the same error."""
    ran = faulty(root, {"manifest": [1, 0]}, LAST + 1, 2)
    assert ran.problem is not None
    assert ran.problem.startswith("`train.resume` has no undamaged checkpoint. ")
    assert ran.problem.count("rank 1: No space left on device: /manifest") == 2
    assert ran.of_kind("step") == []


def test_runs_work_without_a_group() -> None:
    assert run_on_every_rank(lambda: 5, None) == [5]
    assert run_on_first_rank(lambda: "x", None) == "x"
    with pytest.raises(UserError, match=r"^Permission denied: /x$"):
        run_on_every_rank(_denied, None)


def _denied() -> None:
    raise PermissionError(errno.EACCES, "Permission denied", "/x")


def test_formats_an_error_as_one_bounded_line() -> None:
    assert format_error(ValueError("a\n  b\0")) == "ValueError: a b"
    assert len(format_error(RuntimeError("x" * 9999))) == 500
    both = CheckpointException("write", {3: (OSError(28, "full", "/a"), None), 1: (OSError("odd"), None)})  # type: ignore[dict-item]
    assert format_error(both) == "rank 1: OSError: odd"


@pytest.fixture
def small_root(tmp_path: Path) -> Iterator[Path]:
    """Mount a root with space for only one checkpoint."""
    folder = tmp_path / "root"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", ONE_AND_A_HALF, "tmpfs", folder]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("no filesystem may be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize(
    "layout", [pytest.param({}, marks=pytest.mark.slow), {"dp": 2, "zero": 2}], ids=["alone", "two ranks"]
)
def test_reports_a_full_disk_and_loads_the_previous_checkpoint(
    small_root: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    ran = run(make_spec(layout, checkpoint_every=2, keep_checkpoints=9), small_root)
    assert sorted(ran.losses) == [1, 2, 3, 4, 5, 6], "training went on"
    result = {item["step"]: item["problem"] for item in ran.of_kind("checkpoint")}
    assert result[2] == ""
    for step in (4, 6):
        draft = re.escape(str(small_root / "job" / "1" / f".step-{step:08d}.draft"))
        found = re.fullmatch(
            rf"rank \d: No disk space on {re.escape(socket.gethostname())}: No space left on device: {draft} "
            r"needs at least ([\d,]+) bytes, but has ([\d,]+), ([\d,]+) bytes are free",
            result[step],
        )
        assert found, result[step]
        needed, there, free = (int(number.replace(",", "")) for number in found.groups())
        assert there < needed
        assert free < needed - there
    assert [one.step for one in list_complete(small_root)] == [2]
    assert not list(small_root.glob("**/.step-*.draft")), "truncated text leaves space for other errors"
    shutil.copytree(small_root, tmp_path / "roomy" / "root")
    assert sorted(run(make_spec(layout, checkpoint_every=2), tmp_path / "roomy" / "root", attempt=2).losses) == [
        3,
        4,
        5,
        6,
    ]


def test_keeps_the_text_of_other_errors(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), report_disk_full("h", tmp_path):
        raise PermissionError(13, "Permission denied", "/x")


def test_a_full_disk_error_is_picklable_and_names_the_host(tmp_path: Path) -> None:
    (tmp_path / "__1_0.distcp").write_bytes(b"12")
    with pytest.raises(CheckpointDiskFullError) as raised, report_disk_full("h", tmp_path / "gone" / "draft"):
        raise OSError(122, "Disk quota exceeded")
    result = format_error(pickle.loads(pickle.dumps(raised.value)))
    assert re.fullmatch(
        rf"No disk space on h: Disk quota exceeded: {tmp_path}/gone/draft, [\d,]+ bytes are free", result
    )
    with (
        pytest.raises(CheckpointDiskFullError, match=r"needs at least 1,000 bytes, but has 2, "),
        report_disk_full("h", tmp_path, 1000, "__1_"),
    ):
        raise OSError(28, "No space left on device")
