"""Hosts that share no checkpoint root, and a retry that must not begin anew in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.facts.parse_spec import parse_spec
from tests.support.ranks import forked
from workers.checkpoint import folder
from workers.trainer.errors import UserError


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    base = tmp_path_factory.mktemp("apart")
    done = forked(3, "tests.workers.checkpoint.apart", str(base))
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((base / f"said-{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.slow
def test_a_checkpoint_is_collected_on_one_host_and_brought_to_the_other_whole(said: list[dict[str, Any]]) -> None:
    assert [one["damage"] for one in said] == [None] * 3
    assert "1/step-00000007" in said[1]["have"]
    assert [one["left"] for one in said] == [False] * 3, "no draft stays behind"


@pytest.mark.slow
def test_a_host_that_cannot_take_it_fails_all_and_says_why(said: list[dict[str, Any]]) -> None:
    for one in said:
        assert one["problem"].startswith("the checkpoint cannot be brought to this host: ")
        assert "2" in one["problem"]
    assert said[1]["have"] == ["1/step-00000007"], "what it had stays"


@pytest.mark.slow
def test_each_host_looks_at_all_of_its_own_copy(said: list[dict[str, Any]]) -> None:
    """A file that another host's rank looked at, of its own, was loaded here unseen."""
    assert [one["looked"] for one in said] == ["__0_0.distcp has other content than was written (CRC-32 differs)"] * 3


@pytest.mark.slow
def test_of_what_is_damaged_where_it_lies_the_one_before_is_brought(said: list[dict[str, Any]]) -> None:
    assert [one["brought"] for one in said] == [[4], [4, 8], [4]]
    assert [one["passed over"] for one in said] == [[[1, 8]]] * 3, "a run that expects it hears why it begins before"
    assert [one["of others' folders"] for one in said] == [[]] * 3


@pytest.mark.slow
def test_a_copy_that_is_cut_short_is_had_again_from_one_that_is_not(said: list[dict[str, Any]]) -> None:
    """All had it, and nothing was brought: of the others' whole copies nothing came, and there was none before."""
    assert [one["mended"] for one in said] == ["whole"] * 3


def publish(job: Path, attempt: int, step: int) -> None:
    draft = folder.draft_of(folder.step_folder(job / str(attempt), step))
    draft.mkdir(parents=True)
    folder.publish(draft, parse_spec({"model": {"preset": "gpt-tiny"}}), step, {}, [], {})


def test_a_retry_goes_on_from_what_was_told_or_later_and_never_from_less(tmp_path: Path) -> None:
    job = tmp_path / "job"

    def must_have(expected: str) -> None:
        folder.must_have(folder.complete_below(job)[::-1], expected, "anna")

    with pytest.raises(
        UserError, match=r"Checkpoint job/1/step-00000020 .* on host anna is missing .* Newest checkpoint here: none\."
    ):
        must_have("job/1/step-00000020")
    publish(job, 1, 10)
    with pytest.raises(UserError, match=r"Newest checkpoint here: 1/step-00000010\."):
        must_have("job/1/step-00000020")
    must_have("job/1/step-00000010")
    publish(job, 2, 5)
    must_have("job/1/step-00000020")  # a later attempt went on from it
