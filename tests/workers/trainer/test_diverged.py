"""A loss that is no number any more ends the run on every rank and says what was asked for, or goes on if told to."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import msgpack
import pytest

from contracts.codec import decode_frame
from planner.facts.spec import TrainSpec
from tests.workers.checkpoint.runs import Ran, make_spec, run
from workers.trainer.errors import DivergedError
from workers.trainer.result import StepResult, stop_if

# Each step multiplies the matrices by 1 - 10 x 10.
WILD: dict[str, Any] = {
    "steps": 24,
    "learning_rate": 10.0,
    "weight_decay": 10.0,
    "grad_clip": 0.0,
    "warmup_steps": 0,
    "eval_every": 1,
    "seq_len": 16,
    "global_batch": 2,
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Two stages, of which only the last computes a loss."""
    return run(make_spec({"pp": 2}, **WILD, checkpoint_every=1), tmp_path_factory.mktemp("stopped") / "checkpoints")


@pytest.fixture(scope="module")
def went_on(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run(make_spec({}, **WILD, on_not_finite="continue"), tmp_path_factory.mktemp("went-on") / "checkpoints")


def test_every_rank_ends_at_the_same_step_and_says_with_what_it_diverged(stopped: Ran) -> None:
    assert stopped.problem is not None
    said = re.fullmatch(r"(?:loss|gradient norm).* is (?:nan|inf) at step (\d+); (.*)", stopped.problem)
    assert said is not None, stopped.problem
    assert "learning rate 10 (" in said[2]
    assert "gradient clip off" in said[2]
    last = [max(item["step"] for item in items if item["kind"] == "step") for items in stopped.items]
    assert last == [int(said[1])] * 2
    assert last[0] < WILD["steps"]
    assert stopped.of_kind("verdict") == []
    saved = [item["step"] for item in stopped.of_kind("checkpoint")]
    assert saved == list(range(1, last[0])), "nothing of the step that diverged is kept"


def test_one_that_is_told_to_goes_on(went_on: Ran) -> None:
    assert went_on.problem is None
    assert len(went_on.of_kind("step")) == WILD["steps"]
    assert len(went_on.of_kind("verdict")) == 1
    assert 0 < len(went_on.of_kind("eval")) < WILD["steps"], "a validation that is no number is not sent"


def test_a_validation_that_is_no_number_ends_the_run_too(tmp_path: Path) -> None:
    spec = make_spec({}, **{**WILD, "steps": 3, "learning_rate": 0.001, "weight_decay": 0.0})
    ran = run(spec, tmp_path / "checkpoints", module="tests.workers.checkpoint.unsure")
    assert ran.problem is not None
    assert ran.problem.startswith("validation loss is nan at step 1; learning rate 0.001 (")
    assert len(ran.of_kind("step")) == 1


def test_no_item_carries_what_is_no_number(stopped: Ran, went_on: Ran) -> None:
    items = [*stopped.items[0], *stopped.items[1], *went_on.items[0]]
    frame = {"v": 1, "job": "job", "attempt": 1, "rank": 0, "items": items}
    assert len(decode_frame(msgpack.packb(frame))["items"]) == len(items)
    told = [item for item in items if "not_finite" in item]
    assert all("is nan" in item["not_finite"] or "is inf" in item["not_finite"] for item in told)
    assert all(None in (item["loss"], item["grad_norm"]) for item in told)
    assert len(told) > 2


@pytest.mark.parametrize(
    ("loss", "norm", "words"),
    [
        (1.0, 2.0, ""),
        (math.nan, 2.0, "loss is nan"),
        (1.0, math.inf, "gradient norm is inf"),
        (-math.inf, math.nan, "loss is -inf and gradient norm is nan"),
    ],
)
def test_what_is_not_finite_is_named(loss: float, norm: float, words: str) -> None:
    assert StepResult(loss, norm).not_finite == words
    train = TrainSpec(learning_rate=0.5, warmup_steps=4)
    stop_if(words, 0, train.model_copy(update={"on_not_finite": "continue"}))
    if not words:
        stop_if(words, 0, train)
        return
    with pytest.raises(DivergedError) as told:
        stop_if(words, 0, train)
    rates = "learning rate 0.5 (0.125 at this step), gradient clip 1, precision fp32"
    assert str(told.value) == f"{words} at step 1; {rates}"
