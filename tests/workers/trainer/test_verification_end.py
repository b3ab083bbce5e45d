"""Verification at the end of a run: divergence, requested stops, and early stops."""

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
from workers.trainer.errors import DivergedError, VerificationError
from workers.trainer.trainer import RunHooks, StepResult
from workers.trainer.verification import RunVerifier, verifier
from workers.trainer.verification.reference import ReferenceRun
from workers.trainer.verification.replicas import list_shards

quiet: Any = lambda _told: None  # noqa: E731


def test_a_short_run_has_an_extra_step_only_for_its_validation(tmp_path: Path) -> None:
    assert "end" not in proven(one_rank(tmp_path, steps=3, eval_every=0))[-1]
    assert proven(one_rank(tmp_path, steps=3, eval_every=3))[-1]["end"]["state"] == "equal"
    assert "end" not in proven(one_rank(tmp_path, verify="off"))[-1]


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_nan_weights_after_the_last_update_end_the_run(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No later step would show NaN weights of the last update."""
    trainer = one_rank(tmp_path, on_not_finite=policy, eval_every=0)
    update = trainer.update_weights

    def breaks(index: int) -> None:
        update(index)
        if index == 3:
            trainer.model.parameters[0].weight.data.fill_(math.nan)

    monkeypatch.setattr(trainer, "update_weights", breaks)
    if policy == "stop":
        with pytest.raises(
            DivergedError, match="loss is nan and gradient norm is nan in the extra final step at step 5"
        ):
            proven(trainer)
        return
    end = proven(trainer)[-1]["end"]
    assert (end["state"], end["why"][:11]) == ("not checked", "loss is nan")


def test_a_reference_that_is_not_finite_is_a_mismatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = verifier.compute_reference

    def wrong(*request: Any) -> ReferenceRun:
        found = computed(*request)
        return found._replace(results=[StepResult(math.nan, math.nan), *found.results[1:]])

    monkeypatch.setattr(verifier, "compute_reference", wrong)
    with pytest.raises(VerificationError, match="loss of step 1 differs from the reference"):
        proven(one_rank(tmp_path))


def test_compares_replicas_before_a_save_and_stop(tmp_path: Path) -> None:
    """A checkpoint contains only one replica."""
    trainer, saved = one_rank(tmp_path), list[int]()
    watch = RunVerifier(trainer, quiet, quiet)
    stops: Any = lambda done: done == 2  # noqa: E731
    trainer.train(RunHooks(quiet, quiet, watch, save=saved.append, should_stop=stops))
    assert (saved, watch.failure) == ([2], "")
    other = one_rank(tmp_path)
    doubled = RunVerifier(other, quiet, quiet)
    with torch.no_grad():
        trainer.model.parameters[0].weight.add_(1.0)
    doubled._shards = [
        piece for one in (other, trainer) for piece in list_shards(one.spec, one.mesh.coordinates, one.model)
    ]
    doubled.verifies_step = lambda _index: False  # type: ignore[method-assign]
    with pytest.raises(VerificationError, match=r"weight of .* differs"):
        other.train(RunHooks(quiet, quiet, doubled, save=saved.append, should_stop=stops))
    assert saved == [2], "it is not saved"


def test_does_not_save_replicas_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A saved checkpoint would hide the difference."""
    trainer, other, saved = one_rank(tmp_path), one_rank(tmp_path, checkpoint_every=2), list[int]()
    watch, steps = RunVerifier(other, quiet, quiet), other.spec.train.steps
    updated, watch._end = watch.check_update, None
    with torch.no_grad():
        trainer.model.parameters[0].weight.add_(1.0)

    def differs(index: int, result: StepResult) -> None:
        if index + 1 == steps:
            watch._shards = [
                piece for one in (other, trainer) for piece in list_shards(one.spec, one.mesh.coordinates, one.model)
            ]
        updated(index, result)

    monkeypatch.setattr(watch, "check_update", differs)
    with pytest.raises(VerificationError, match=r"weight of .* differs"):
        other.train(RunHooks(quiet, quiet, watch, save=saved.append))
    assert saved == list(range(2, steps, 2))


def test_a_run_that_stopped_early_keeps_the_limits_of_the_first_steps(tmp_path: Path) -> None:
    trainer = one_rank(tmp_path, steps=9)
    stored = [RunVerifier(trainer, quiet, quiet, done)._limits for done in (0, 2, 3)]
    assert stored == [get_tolerances(trainer.spec), get_tolerances(trainer.spec), get_resumed_tolerances(trainer.spec)]


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_resumed_limits_detect_missing_and_doubled_gradients(precision: str, tmp_path: Path) -> None:
    spec = one_rank(tmp_path).spec
    most = get_resumed_tolerances(
        spec.model_copy(update={"train": spec.train.model_copy(update={"precision": precision})})
    )
    assert max(most.gradient, most.vector, most.router) < 1.0 - 1e-6, "the difference is 1 except for rounding"


def test_skips_a_reference_that_takes_longer_than_ranks_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout is a setting of the host."""
    spec = one_rank(tmp_path).spec
    monkeypatch.setattr(verifier, "estimate_reference_seconds", lambda _spec: 200.0)
    wide = spec.model_copy(update={"layout": Layout(dp=2)})
    assert verifier._explain_timeout(wide) == ""
    monkeypatch.setenv(GROUP_TIMEOUT_VARIABLE, "120")
    words = "the reference would take about 200 s, and ranks wait at most 120 s on this host"
    assert verifier._explain_timeout(wide) == words
    assert verifier._explain_timeout(spec) == "", "nobody waits"
