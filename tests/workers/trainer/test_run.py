"""The command as torchrun starts it: it learns, its traffic is as predicted, and mistakes are told in one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.ranks import forked, run_to_end, torchrun

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


def run(spec: Path, data_root: Path, *, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    options = ["--spec", str(spec), "--data-root", str(data_root)]
    if ranks == 1:
        return forked(1, "workers.trainer.__main__", *options)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return run_to_end(torchrun(ranks, "-m", "workers.trainer", *options), environment, limit_s=240)


def written(folder: Path, spec: object) -> Path:
    path = folder / "spec.json"
    path.write_text(json.dumps(spec))
    return path


@pytest.mark.slow
def test_the_loss_falls_on_the_standard_library_and_every_byte_was_predicted(tmp_path: Path) -> None:
    done = run(written(tmp_path, LEARNS), tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(x) for x in re.findall(r"^step \d+/150 loss ([\d.]+)", done.stdout, re.MULTILINE)]
    validation = [float(x) for x in re.findall(r"validation loss ([\d.]+)", done.stdout)]
    assert len(losses) == 150
    assert len(validation) == 2
    # Knowing nothing of 256 bytes costs ln 256 = 5.55; a tied table starts a little better, as spaces repeat.
    # The corpus' bytes by their frequency alone cost 3.25: below that, the model has learned from context.
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


ALONE = {**LEARNS, "layout": {}}


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
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path, spec: object, message: str) -> None:
    (tmp_path / "short.txt").write_text("short")
    done = run(spec=written(tmp_path, spec), data_root=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_token_that_one_rank_draws_ends_the_run_on_all(tmp_path: Path) -> None:
    train = {"steps": 100_000, "global_batch": 2, "seq_len": 8, "eval_every": 0, "data": "x.bin"}
    spec = written(tmp_path, {**LEARNS, "layout": {"dp": 2}, "train": train})
    np.repeat(np.array([0, 999], dtype=np.uint16), [10_000, 2_000]).tofile(tmp_path / "x.bin")
    done = run(spec, tmp_path, ranks=2)
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert told
    assert all("`train.data` is 'x.bin', which has token 999 at position 1" in line for line in told)


def test_an_unreadable_spec_file_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = run(spec=tmp_path / "absent.json", data_root=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: `--spec` is ")
