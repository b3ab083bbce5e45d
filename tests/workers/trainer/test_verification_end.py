"""How a run ends by its proof: at no number, before it stops for now, within steps that were not compared yet."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.facts.single_process_reference import get_resumed_tolerances, get_tolerances
from planner.facts.spec import Layout
from tests.workers.trainer.test_verification import one_rank, proven
from workers.rank_environment import GROUP_TIMEOUT_VARIABLE
from workers.trainer.errors import DivergedError, ProofError
from workers.trainer.trainer import StepResult, train
from workers.trainer.verification import Proof, verifier
from workers.trainer.verification.reference import Reference
from workers.trainer.verification.shards import pieces_of

quiet: Any = lambda _told: None  # noqa: E731


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_weights_that_the_last_update_made_no_numbers_end_the_run_as_any_would(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No later step told of them: the job had succeeded, with a checkpoint of nan."""
    trainer = one_rank(tmp_path, on_not_finite=policy, eval_every=0)
    update = trainer.update

    def breaks(index: int, norm: float) -> None:
        update(index, norm)
        if index == 3:
            trainer.part.tensors[0].tensor.data.fill_(math.nan)

    monkeypatch.setattr(trainer, "update", breaks)
    if policy == "stop":
        with pytest.raises(
            DivergedError, match="loss is nan and gradient norm is nan in the extra final step at step 5"
        ):
            proven(trainer)
        return
    end = proven(trainer)[-1]["end"]
    assert (end["state"], end["why"][:11]) == ("not checked", "loss is nan")


def test_one_process_that_finds_no_number_where_the_run_did_is_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = verifier.compute

    def wrong(*asked: Any) -> Reference:
        found = computed(*asked)
        return found._replace(results=[StepResult(math.nan, math.nan), *found.results[1:]])

    monkeypatch.setattr(verifier, "compute", wrong)
    with pytest.raises(ProofError, match="loss of step 1 differs from the reference"):
        proven(one_rank(tmp_path))


def test_copies_are_compared_before_a_run_saves_and_stops(tmp_path: Path) -> None:
    """What is loaded again is one of them: nothing told of the others any more."""
    trainer, saved = one_rank(tmp_path), list[int]()
    watch = Proof(trainer, quiet, quiet)
    stops: Any = lambda done: done == 2  # noqa: E731
    train(trainer, quiet, quiet, 0, saved.append, watch, stop=stops)
    assert (saved, watch.failed) == ([2], "")
    other = one_rank(tmp_path)
    doubled = Proof(other, quiet, quiet)
    with torch.no_grad():
        trainer.part.tensors[0].tensor.add_(1.0)
    doubled._pieces = [piece for one in (other, trainer) for piece in pieces_of(one.spec, one.mesh.place, one.part)]
    doubled.looks = lambda _index: False  # type: ignore[method-assign]
    with pytest.raises(ProofError, match=r"weight of .* differs"):
        train(other, quiet, quiet, 0, saved.append, doubled, stop=stops)
    assert saved == [2], "it is not saved"


def test_what_differs_after_the_last_step_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older sound checkpoint went for it, and who loaded it found one copy and nothing wrong."""
    trainer, other, saved = one_rank(tmp_path), one_rank(tmp_path, checkpoint_every=2), list[int]()
    watch, steps = Proof(other, quiet, quiet), other.spec.train.steps
    updated, watch._end = watch.updated, None
    with torch.no_grad():
        trainer.part.tensors[0].tensor.add_(1.0)

    def differs(index: int, result: StepResult) -> None:
        if index + 1 == steps:
            watch._pieces = [
                piece for one in (other, trainer) for piece in pieces_of(one.spec, one.mesh.place, one.part)
            ]
        updated(index, result)

    monkeypatch.setattr(watch, "updated", differs)
    with pytest.raises(ProofError, match=r"weight of .* differs"):
        train(other, quiet, quiet, 0, saved.append, watch)
    assert saved == list(range(2, steps, 2))


def test_a_run_that_stopped_within_the_compared_steps_is_held_to_their_limits(tmp_path: Path) -> None:
    trainer = one_rank(tmp_path, steps=9)
    kept = [Proof(trainer, quiet, quiet, done)._limits for done in (0, 2, 3)]
    assert kept == [get_tolerances(trainer.spec), get_tolerances(trainer.spec), get_resumed_tolerances(trainer.spec)]


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_gradient_that_is_missing_or_doubled_is_beyond_what_a_run_that_goes_on_may(
    precision: str, tmp_path: Path
) -> None:
    spec = one_rank(tmp_path).spec
    most = get_resumed_tolerances(
        spec.model_copy(update={"train": spec.train.model_copy(update={"precision": precision})})
    )
    assert max(most.gradient, most.vector, most.router) < 1.0 - 1e-6, "they are 1 apart, but for rounding"


def test_one_process_is_not_asked_where_the_others_would_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long they wait is the host's setting: a job that was asked to be verified died of it."""
    spec = one_rank(tmp_path).spec
    monkeypatch.setattr(verifier, "estimate_reference_seconds", lambda _spec: 200.0)
    wide = spec.model_copy(update={"layout": Layout(dp=2)})
    assert verifier._too_long(wide) == ""
    monkeypatch.setenv(GROUP_TIMEOUT_VARIABLE, "120")
    words = "the reference would take about 200 s, and ranks wait at most 120 s on this host"
    assert verifier._too_long(wide) == words
    assert verifier._too_long(spec) == "", "nobody waits"
