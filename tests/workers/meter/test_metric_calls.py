"""Calls of logging libraries are read without a change of the script, and keep their behavior."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from workers.meter.metric_calls import capture_metrics
from workers.metric_values import MetricCollector

# Stand-ins with the signatures of the libraries, which the meter never imports itself.
LIBRARIES = {
    "wandb/sdk/wandb_run.py": """
class Run:
    def __init__(self): self._local_step, self.calls = 0, []
    def log(self, data, step=None, commit=None):
        self.calls.append((data, step))
        self._local_step += 1
        return "logged"
""",
    "trackio/run.py": """
class Run:
    def __init__(self): self._next_step = 4
    def log(self, metrics, step=None): self._next_step += 1
""",
    "mlflow/__init__.py": """
def log_metric(key, value, step=None, synchronous=None): return 1
def log_metrics(metrics, step=None, synchronous=None): raise OSError("no server")
""",
    "transformers/trainer.py": """
class State: global_step = 30
class Trainer:
    state = State()
    def log(self, logs, start_time=None): logs["epoch"] = 1.5
""",
    "tensorboardX/writer.py": """
class SummaryWriter:
    def add_scalar(self, tag, scalar_value, global_step=None, walltime=None): pass
    def add_scalars(self, main_tag, tag_scalar_dict, global_step=None): pass
""",
}
OWN = {name.split("/")[0] for name in LIBRARIES}


@pytest.fixture
def collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MetricCollector]:
    for name, text in LIBRARIES.items():
        path = tmp_path / name
        for folder in [path.parent, *path.parent.parents]:
            if folder == tmp_path:
                break
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "__init__.py").touch()
        path.write_text(text)
    known = {name: module for name, module in sys.modules.items() if name.split(".")[0] in OWN}
    for name in known:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    collector = MetricCollector(0)
    remove = capture_metrics(collector, lambda: 77)
    yield collector
    remove()
    for name in [name for name in sys.modules if name.split(".")[0] in OWN]:
        del sys.modules[name]


def take(collector: MetricCollector) -> list[tuple[str, int, dict[str, Any]]]:
    return [(item["source"], item["step"], item["values"]) for item in collector.take()]


def test_wandb_counts_steps_as_the_library_does(collector: MetricCollector) -> None:
    run = importlib.import_module("wandb.sdk.wandb_run").Run()
    log = run.log  # as wandb.log is after wandb.init
    assert log({"loss": torch.tensor(2.0), "picture": object()}) == "logged"
    log({"loss": 1.5}, step=10)
    log({"train/loss": 1.0, "train/global_step": 12})
    assert take(collector) == [
        ("wandb", 0, {"loss": 2.0}),
        ("wandb", 10, {"loss": 1.5}),
        ("wandb", 12, {"train/loss": 1.0, "train/global_step": 12.0}),
    ]
    assert [step for _, step in run.calls] == [None, 10, None]


def test_trackio_mlflow_and_trainer(collector: MetricCollector) -> None:
    importlib.import_module("trackio.run").Run().log({"loss": 3.0})
    mlflow = importlib.import_module("mlflow")
    assert mlflow.log_metric("loss", 2.0, step=3) == 1
    mlflow.log_metric("loss", value=1.0)
    importlib.import_module("transformers.trainer").Trainer().log({"loss": 0.5})
    assert take(collector) == [
        ("trackio", 4, {"loss": 3.0}),
        ("mlflow", 3, {"loss": 2.0}),
        ("mlflow", 77, {"loss": 1.0}),
        ("Trainer.log", 30, {"loss": 0.5, "epoch": 1.5}),
    ]


def test_error_of_a_library_reaches_the_script(collector: MetricCollector) -> None:
    with pytest.raises(OSError, match="no server"):
        importlib.import_module("mlflow").log_metrics({"loss": 1.0})
    assert take(collector) == []


def test_summary_writers(collector: MetricCollector) -> None:
    writer = importlib.import_module("tensorboardX.writer").SummaryWriter()
    writer.add_scalar("Loss/train", 2.0, 5)
    writer.add_scalar("loss", scalar_value=math.nan, global_step=6)
    writer.add_scalars("eval", {"loss": 1.0, "accuracy": 0.5}, 7)
    items = collector.take()
    assert [(item["step"], item["values"], item.get("not_finite")) for item in items] == [
        (5, {"Loss/train": 2.0}, None),
        (6, {}, {"loss": "nan"}),
        (7, {"eval/loss": 1.0, "eval/accuracy": 0.5}, None),
    ]


def test_library_that_is_imported_before_the_hook(collector: MetricCollector, tmp_path: Path) -> None:
    writer = importlib.import_module("torch.utils.tensorboard.writer")
    original = writer.SummaryWriter.add_scalar
    later = MetricCollector(1)
    remove = capture_metrics(later, lambda: 0)
    try:
        with writer.SummaryWriter(str(tmp_path)) as opened:
            opened.add_scalar("loss", 4.0, 2)
    finally:
        remove()
        writer.SummaryWriter.add_scalar = original
    assert take(later) == [("SummaryWriter", 2, {"loss": 4.0})]


def test_unreadable_call_warns_once_and_succeeds(
    collector: MetricCollector, capsys: pytest.CaptureFixture[str]
) -> None:
    run = importlib.import_module("wandb.sdk.wandb_run").Run()
    for _ in range(2):
        assert run.log(["no", "mapping"]) == "logged"
    assert capsys.readouterr().err.count("meshboard: cannot read a call of wandb") == 1
