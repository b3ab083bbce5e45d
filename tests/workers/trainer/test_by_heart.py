"""A run on data that it learns by heart: what is left of its loss is rounding, and so are its gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.parity.cases import make_spec
from tests.support.ranks import forked


@pytest.mark.parametrize(
    ("rate", "told"),
    [
        pytest.param(5e-3, "extra final step matches the reference to ", id="a loss of 1e-4"),
        pytest.param(3e-2, "extra final step not compared: step 61 is not compared: the loss ", id="of 1e-6"),
    ],
)
def test_a_run_that_has_learnt_its_data_by_heart_is_not_told_to_be_wrong(
    tmp_path: Path, rate: float, told: str
) -> None:
    """It FAILED after step 3, for queries' gradients that were 5e-9 of the others', and at its end, 0.08 apart."""
    np.full(5_000, 7, np.uint16).tofile(tmp_path / "heart.bin")
    train = {"steps": 60, "eval_every": 0, "data": "heart.bin", "learning_rate": rate}
    path = tmp_path / "spec.json"
    path.write_text(make_spec("llama", {"tp": 2}, 2, train=train).model_dump_json())
    done = forked(2, "workers.trainer.__main__", "--spec", str(path), "--data-root", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert told in done.stdout, done.stdout[-3000:]
