"""Compiled blocks compute the same losses. `make parity` tests the kernels of Inductor."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from planner.facts.parse_spec import parse_fields, parse_spec
from planner.facts.spec_rules import find_unsupported_fields
from tests.parity.cases import SIZES, write_data
from tests.parity.rank import make_trainer
from workers.meter import Recorder
from workers.trainer.errors import UserError


def losses(folder: Path, *, arch: str, recompute: str, compiled: bool) -> list[float]:
    settings = {"global_batch": 4, "micro_batches": 2, "seq_len": 32, "data": "parity.bin", "compile": compiled}
    spec = parse_spec({"model": SIZES[arch], "layout": {"recompute": recompute}, "train": settings})
    trainer = make_trainer(spec, folder, Recorder(0))
    return [trainer.train_step(index).loss for index in range(3)]


@pytest.mark.parametrize(
    ("arch", "recompute"), [("gpt", "none"), pytest.param("llama", "full", marks=pytest.mark.slow)]
)
def test_compiled_layers_share_one_graph_and_have_equal_losses(
    arch: str, recompute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_data(tmp_path)
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    found = losses(tmp_path, arch=arch, recompute=recompute, compiled=True)
    assert found == pytest.approx(losses(tmp_path, arch=arch, recompute=recompute, compiled=False), rel=1e-6)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_names_a_missing_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_data(tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"train\.compile` .* this host has no no-such-compiler"):
        losses(tmp_path, arch="gpt", recompute="none", compiled=True)


def test_rejects_options_that_cannot_be_compiled() -> None:
    layout = {"pp": 2, "schedule": "zbv", "virtual_stages": 2, "recompute": "selective"}
    fields = {"model": {"preset": "gpt-tiny"}, "layout": layout, "train": {"compile": True, "micro_batches": 4}}
    (problem,) = find_unsupported_fields(parse_fields(fields))
    assert problem.field == "train.compile"
    assert "a schedule that splits backward and selective recompute" in problem.message
