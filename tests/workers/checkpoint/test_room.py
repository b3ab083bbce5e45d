"""Report a full disk while saving, and resume from the previous checkpoint."""

from __future__ import annotations

import pickle
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers.checkpoint.runs import make_spec, run
from workers.checkpoint.coordination import DiskFullError, format_error, report_disk_full
from workers.checkpoint.folder import list_complete

ONE_AND_A_HALF = "size=4400k"  # checkpoints of the model below


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
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
    root: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    ran = run(make_spec(layout, checkpoint_every=2, keep_checkpoints=9), root)
    assert sorted(ran.losses) == [1, 2, 3, 4, 5, 6], "training went on"
    told = {item["step"]: item["problem"] for item in ran.of_kind("checkpoint")}
    assert told[2] == ""
    for step in (4, 6):
        draft = re.escape(str(root / "job" / "1" / f".step-{step:08d}.draft"))
        found = re.fullmatch(
            rf"rank \d: No disk space on {re.escape(socket.gethostname())}: No space left on device: {draft} "
            r"needs at least ([\d,]+) bytes, but has ([\d,]+), ([\d,]+) bytes are free",
            told[step],
        )
        assert found, told[step]
        needed, there, free = (int(number.replace(",", "")) for number in found.groups())
        assert there < needed
        assert free < needed - there
    assert [one.step for one in list_complete(root)] == [2]
    assert not list(root.glob("**/.step-*.draft")), "what was cut leaves its room to others"
    shutil.copytree(root, tmp_path / "roomy" / "root")
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
    with pytest.raises(DiskFullError) as raised, report_disk_full("h", tmp_path / "gone" / "draft"):
        raise OSError(122, "Disk quota exceeded")
    told = format_error(pickle.loads(pickle.dumps(raised.value)))
    assert re.fullmatch(rf"No disk space on h: Disk quota exceeded: {tmp_path}/gone/draft, [\d,]+ bytes are free", told)
    with (
        pytest.raises(DiskFullError, match=r"needs at least 1,000 bytes, but has 2, "),
        report_disk_full("h", tmp_path, 1000, "__1_"),
    ):
        raise OSError(28, "No space left on device")
