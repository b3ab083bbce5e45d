"""The trainer command: imports, training, user errors, and divergence."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from contracts.codec import decode_frame
from planner.facts.spec import TrainSpec
from planner.facts.validation import SpecError
from tests.support.processes import base_environment
from tests.support.ranks import build_torchrun_command, run_ranks, run_to_completion
from tests.workers.checkpoint.runs import Ran, make_spec, run
from webapp.runner import find_free_port
from workers.trainer.errors import DivergedError
from workers.trainer.spec_file import load_spec
from workers.trainer.trainer import StepResult, raise_if_diverged

HEAVY = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "sympy",
)
TRAINS = f"""
import sys
from workers.trainer.__main__ import main
sys.argv[1:] = ["--spec", sys.argv[1], "--data-root", sys.argv[2]]
code = main()
print([name for name in {HEAVY} if name in sys.modules])
sys.exit(code)
"""
LEARNS: dict[str, Any] = {
    "model": {"preset": "gpt-tiny", "hidden_size": 64, "ffn_hidden_size": 256},
    "layout": {"dp": 2, "zero": 3},
    "train": {
        "steps": 150,
        "global_batch": 16,
        "micro_batches": 2,
        "seq_len": 64,
        "learning_rate": 5e-3,
        "warmup_steps": 5,
        "eval_every": 75,
    },
}
ALONE = {**LEARNS, "layout": {}}
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


def test_a_rank_does_not_import_unused_libraries(tmp_path: Path) -> None:
    """Only ZeRO, checkpoints, and compilation import these libraries."""
    spec = tmp_path / "spec.json"
    spec.write_text('{"model": {"preset": "gpt-tiny"}, "train": {"steps": 2, "global_batch": 2, "seq_len": 32}}')
    argv = [sys.executable, "-c", TRAINS, str(spec), str(tmp_path)]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    done = run_to_completion(argv, {**base_environment(), **alone})
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": {"preset": "gpt-tiny", "sliding_window": 8}}, "model.sliding_window"),
        ({"model": {"preset": "gpt-tiny", "head_dim": 8}}, "model.head_dim"),
        ({"resources": {"device": "cuda", "stack": "megatron"}}, "resources.stack"),
    ],
)
def test_rejects_options_that_the_trainer_does_not_support(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    """The board rejects the same options before it sends a job."""
    path = tmp_path / "spec.json"
    path.write_text(json.dumps({"model": {"preset": "gpt-tiny"}, **change}))
    with pytest.raises(SpecError, match=rf"`{field}`: the trainer does not support"):
        load_spec(path, 1)


def run_command(spec: Path, data_root: Path, *, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    options = ["--spec", str(spec), "--data-root", str(data_root)]
    if ranks == 1:
        return run_ranks(1, "workers.trainer.__main__", *options)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return run_to_completion(build_torchrun_command(ranks, "-m", "workers.trainer", *options), environment, limit_s=240)


def written(folder: Path, spec: object) -> Path:
    path = folder / "spec.json"
    path.write_text(json.dumps(spec))
    return path


@pytest.mark.slow
def test_the_loss_decreases_and_the_traffic_matches(tmp_path: Path) -> None:
    done = run_command(written(tmp_path, LEARNS), tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(x) for x in re.findall(r"^step \d+/150 loss ([\d.]+)", done.stdout, re.MULTILINE)]
    validation = [float(x) for x in re.findall(r"validation loss ([\d.]+)", done.stdout)]
    assert len(losses) == 150
    assert len(validation) == 2
    # A uniform guess of 256 bytes costs ln 256 = 5.55. A tied table starts slightly better, because spaces repeat.
    # Byte frequencies alone cost 3.25. A lower loss shows that the model has learned from context.
    assert 5.2 < losses[0] < 5.7
    assert sum(losses[-10:]) / 10 < 3.2
    assert validation[1] < 3.25
    assert validation[1] < validation[0] < losses[0]
    reports = re.findall(
        r"^traffic check: measured ([\d,]+) B, absolute difference (\d+) B, (\d+) calls$",
        done.stdout,
        re.MULTILINE,
    )
    assert len(reports) == 2
    assert all(int(measured.replace(",", "")) > 0 for measured, _, _ in reports)
    assert {(wrong_bytes, wrong_calls) for _, wrong_bytes, wrong_calls in reports} == {("0", "0")}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        pytest.param({**ALONE, "train": {"data": "../secret.txt"}}, "train.data", id="outside the data root"),
        pytest.param(
            {**ALONE, "train": {"data": "absent.txt"}},
            "`train.data` is 'absent.txt', which does not exist",
            id="missing data",
        ),
        pytest.param({**ALONE, "train": {"data": "short.txt"}}, "'short.txt' with 5 tokens", id="too little data"),
        pytest.param(LEARNS, "`layout` needs 2 ranks, but torchrun started 1.", id="another world size"),
        pytest.param({**ALONE, "layout": {"dp": 0}}, "`layout.dp` is 0. Use at least 1.", id="a spec that cannot run"),
        pytest.param(None, "`spec` is null. Use an object.", id="not a spec"),
    ],
)
def test_reports_a_user_error_in_one_line(tmp_path: Path, spec: object, message: str) -> None:
    (tmp_path / "short.txt").write_text("short")
    done = run_command(spec=written(tmp_path, spec), data_root=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_data_error_on_one_rank_ends_all_ranks(tmp_path: Path) -> None:
    train = {"steps": 100_000, "global_batch": 2, "seq_len": 8, "eval_every": 0, "data": "x.bin"}
    spec = written(tmp_path, {**LEARNS, "layout": {"dp": 2}, "train": train})
    np.repeat(np.array([0, 999], dtype=np.uint16), [10_000, 2_000]).tofile(tmp_path / "x.bin")
    done = run_command(spec, tmp_path, ranks=2)
    assert done.returncode == 1
    result = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert result
    assert all("`train.data` is 'x.bin', which has token 999 at position 1" in line for line in result)


def test_reports_an_unreadable_spec_in_one_line(tmp_path: Path) -> None:
    done = run_command(spec=tmp_path / "absent.json", data_root=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: `--spec` is ")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Run two stages, of which only the last computes a loss."""
    return run(make_spec({"pp": 2}, **WILD, checkpoint_every=1), tmp_path_factory.mktemp("stopped") / "checkpoints")


@pytest.fixture(scope="module")
def went_on(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run(make_spec({}, **WILD, on_not_finite="continue"), tmp_path_factory.mktemp("went-on") / "checkpoints")


def test_all_ranks_stop_at_the_diverged_step(stopped: Ran) -> None:
    assert stopped.problem is not None
    messages = re.fullmatch(r"(?:loss|gradient norm).* is (?:nan|inf) at step (\d+); (.*)", stopped.problem)
    assert messages is not None, stopped.problem
    assert "learning rate 10 (" in messages[2]
    assert "gradient clip off" in messages[2]
    last = [max(item["step"] for item in items if item["kind"] == "step") for items in stopped.items]
    assert last == [int(messages[1])] * 2
    assert last[0] < WILD["steps"]
    assert stopped.of_kind("verdict") == []
    saved = [item["step"] for item in stopped.of_kind("checkpoint")]
    assert saved == list(range(1, last[0])), "the diverged step leaves no state"


def test_continues_after_divergence_on_request(went_on: Ran) -> None:
    assert went_on.problem is None
    assert len(went_on.of_kind("step")) == WILD["steps"]
    assert len(went_on.of_kind("verdict")) == 1
    assert 0 < len(went_on.of_kind("eval")) < WILD["steps"], "a NaN validation loss is not sent"


def test_a_validation_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    spec = make_spec({}, **{**WILD, "steps": 3, "learning_rate": 0.001, "weight_decay": 0.0})
    ran = run(spec, tmp_path / "checkpoints", module="tests.workers.checkpoint.nan_validation")
    assert ran.problem is not None
    assert ran.problem.startswith("validation loss is nan at step 1; learning rate 0.001 (")
    assert len(ran.of_kind("step")) == 1


def test_telemetry_has_no_nan(stopped: Ran, went_on: Ran) -> None:
    items = [*stopped.items[0], *stopped.items[1], *went_on.items[0]]
    frame = {"v": 1, "job": "job", "attempt": 1, "rank": 0, "items": items}
    assert len(decode_frame(msgpack.packb(frame))["items"]) == len(items)
    result = [item for item in items if "not_finite" in item]
    assert all("is nan" in item["not_finite"] or "is inf" in item["not_finite"] for item in result)
    assert all(None in (item["loss"], item["grad_norm"]) for item in result)
    assert len(result) > 2


@pytest.mark.parametrize(
    ("loss", "norm", "words"),
    [
        (1.0, 2.0, ""),
        (math.nan, 2.0, "loss is nan"),
        (1.0, math.inf, "gradient norm is inf"),
        (-math.inf, math.nan, "loss is -inf and gradient norm is nan"),
    ],
)
def test_names_results_that_are_not_finite(loss: float, norm: float, words: str) -> None:
    assert StepResult(loss, norm).not_finite == words
    train = TrainSpec(learning_rate=0.5, warmup_steps=4)
    raise_if_diverged(words, 0, train.model_copy(update={"on_not_finite": "continue"}))
    if not words:
        raise_if_diverged(words, 0, train)
        return
    with pytest.raises(DivergedError) as result:
        raise_if_diverged(words, 0, train)
    rates = "learning rate 0.5 (0.125 at this step), gradient clip 1, precision fp32"
    assert str(result.value) == f"{words} at step 1; {rates}"
