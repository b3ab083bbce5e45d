"""Copy checkpoints between hosts without a shared root, and require the reported checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.facts.parse_spec import parse_spec
from tests.support.ranks import run_ranks
from workers.checkpoint import folder
from workers.trainer.errors import UserError


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    base = tmp_path_factory.mktemp("apart")
    done = run_ranks(3, "tests.workers.checkpoint.apart", str(base))
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((base / f"said-{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.slow
def test_collects_a_checkpoint_on_one_host_and_copies_it_to_the_others(said: list[dict[str, Any]]) -> None:
    assert [one["damage"] for one in said] == [None] * 3
    assert "1/step-00000007" in said[1]["have"]
    assert [one["left"] for one in said] == [False] * 3, "no draft stays behind"


@pytest.mark.slow
def test_fails_on_all_ranks_if_one_host_cannot_write(said: list[dict[str, Any]]) -> None:
    for one in said:
        assert one["problem"].startswith("Cannot copy the checkpoint to this host: ")
        assert "2" in one["problem"]
    assert said[1]["have"] == ["1/step-00000007"], "what it had stays"


@pytest.mark.slow
def test_checks_the_copy_of_each_host(said: list[dict[str, Any]]) -> None:
    """Check files on each host, because copies can differ."""
    assert [one["looked"] for one in said] == ["__0_0.distcp changed after it was written (CRC-32 differs)"] * 3


@pytest.mark.slow
def test_copies_the_previous_checkpoint_if_the_newest_is_damaged(said: list[dict[str, Any]]) -> None:
    assert [one["brought"] for one in said] == [[4], [4, 8], [4]]
    assert [one["passed over"] for one in said] == [[[1, 8]]] * 3, "a run that expects it hears why it begins before"
    assert [one["of others' folders"] for one in said] == [[]] * 3


@pytest.mark.slow
def test_replaces_a_truncated_copy_from_another_host(said: list[dict[str, Any]]) -> None:
    """Copy a checkpoint again if all hosts have it and one copy is truncated."""
    assert [one["mended"] for one in said] == ["whole"] * 3


def publish(job: Path, attempt: int, step: int) -> None:
    draft = folder.get_draft_path(folder.get_step_folder(job / str(attempt), step))
    draft.mkdir(parents=True)
    folder.publish(draft, parse_spec({"model": {"preset": "gpt-tiny"}}), step, {}, [], {})


def test_requires_the_reported_checkpoint_or_a_later_one(tmp_path: Path) -> None:
    job = tmp_path / "job"

    def require_expected(expected: str) -> None:
        folder.require_expected(folder.list_complete(job)[::-1], expected, "anna")

    with pytest.raises(
        UserError, match=r"Checkpoint job/1/step-00000020 .* on host anna is missing .* Newest checkpoint here: none\."
    ):
        require_expected("job/1/step-00000020")
    publish(job, 1, 10)
    with pytest.raises(UserError, match=r"Newest checkpoint here: 1/step-00000010\."):
        require_expected("job/1/step-00000020")
    require_expected("job/1/step-00000010")
    publish(job, 2, 5)
    require_expected("job/1/step-00000020")  # a later attempt went on from it
