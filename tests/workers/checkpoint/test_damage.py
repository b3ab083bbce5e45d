"""What is not whole is said and never loaded; what goes wrong while saving harms no training."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.workers.checkpoint.runs import Ran, make_spec, run
from workers.checkpoint.folder import complete_below


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints") / "root"
    run(make_spec({"dp": 2, "zero": 2}, checkpoint_every=2, keep_checkpoints=3), root)
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "root"))


def resumed(root: Path, resume: str = "job", **train: object) -> Ran:
    return run(make_spec({}, resume=resume, steps=8, **train), root, job="other")


def newest(root: Path) -> Path:
    return complete_below(root / "job")[-1].path


def test_a_truncated_file_is_named_and_the_checkpoint_before_is_loaded(root: Path) -> None:
    file = sorted(newest(root).glob("*.distcp"))[0]
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(size - 7)
    ran = resumed(root)
    told = f"checkpoint step-00000006 is damaged: {file.name} has {size - 7:,} bytes, {size:,} were written"
    assert f"{told}; trying the one before" in ran.output
    assert sorted(ran.losses) == [5, 6, 7, 8]


@pytest.mark.slow
def test_a_changed_byte_is_seen(root: Path) -> None:
    file = sorted(newest(root).glob("*.distcp"))[-1]
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        byte = opened.read(1)
        opened.seek(-1, 1)
        opened.write(bytes([byte[0] ^ 1]))
    ran = resumed(root)
    assert f"{file.name} has other content than was written (CRC-32 differs); trying the one before" in ran.output
    assert sorted(ran.losses) == [5, 6, 7, 8]


@pytest.mark.slow
def test_a_draft_is_no_checkpoint(root: Path) -> None:
    newest(root).rename(root / "job" / "1" / ".step-00000006.draft")
    assert sorted(resumed(root).losses) == [5, 6, 7, 8]


@pytest.mark.slow
def test_when_none_is_whole_every_reason_is_told(root: Path) -> None:
    for checkpoint in complete_below(root / "job"):
        (checkpoint.path / ".metadata").unlink()
    problem = resumed(root).problem
    assert problem is not None
    assert problem.startswith("train.resume: no whole checkpoint. step-00000006: .metadata cannot be read")
    assert "step-00000002: .metadata cannot be read" in problem


@pytest.mark.slow
def test_an_unknown_or_outside_name_is_refused_with_what_there_is(root: Path) -> None:
    have = "complete ones beside it: step-00000002, step-00000004, step-00000006"
    assert have in str(resumed(root, "job/1/step-00000005").problem)
    assert "there is no complete checkpoint in 'jobless'" in str(resumed(root, "jobless").problem)


@pytest.mark.slow
def test_another_model_or_no_step_left_is_refused_with_the_numbers(root: Path) -> None:
    other = run(make_spec({}, "llama", resume="job"), root, job="other")
    assert "the checkpoint holds another model: arch gpt is not llama" in str(other.problem)
    done = run(make_spec({}, resume="job"), root, job="other")
    assert "has done 6 steps of the 6 asked for; raise train.steps" in str(done.problem)


@pytest.mark.slow
def test_only_the_newest_stay(saved: Path, tmp_path: Path) -> None:
    assert [c.step for c in complete_below(saved / "job")] == [2, 4, 6]
    ran = run(make_spec({}, checkpoint_every=1, keep_checkpoints=2), tmp_path / "root")
    assert [c.step for c in complete_below(tmp_path / "root" / "job")] == [5, 6]
    assert len(ran.of_kind("checkpoint")) == 6


@pytest.mark.slow
def test_drafts_that_nobody_finishes_are_deleted_by_the_next_save(tmp_path: Path) -> None:
    """Of its own attempt and of earlier ones; a later attempt is another's to write."""
    left = [tmp_path / "root" / "job" / number / ".step-00000099.draft" for number in ("1", "2", "3")]
    for draft in left:
        draft.mkdir(parents=True)
        (draft / "__0_0.distcp").write_bytes(b"half")
    run(make_spec({}, checkpoint_every=6), tmp_path / "root", attempt=2)
    assert [draft.exists() for draft in left] == [False, False, True]


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_ends_no_training(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "job").write_text("a file where a folder must be")
    ran = run(make_spec({"dp": 2}, checkpoint_every=3), root)
    assert sorted(ran.losses) == [1, 2, 3, 4, 5, 6]
    failed = ran.of_kind("checkpoint")
    assert [item["name"] for item in failed] == [None, None]
    assert all("Not a directory" in item["problem"] for item in failed)
    assert "checkpoint after step 3 could not be written" in ran.output
