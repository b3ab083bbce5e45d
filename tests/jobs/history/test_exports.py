"""Export histories to TensorBoard and MLflow, and read them back with their readers."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.test import Client
from rest_framework.test import APIClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jobs.models import Attempt, Job
from jobs.queue import actions
from jobs.runs.history import exports
from jobs.runs.history.store import query
from tests.jobs.history.sample_telemetry import BEGAN, batch, generate_run, record_batches, step
from tests.planner.wrong_specs import GOOD
from tests.support.processes import mount_full_disk

Api = Callable[[User | None], APIClient]


@pytest.fixture
def recorded(owner: User, tmp_path: Path, settings: Any) -> str:
    """Return a job of two ranks and ten steps, with one non-finite loss and one validation."""
    settings.HISTORY_DIR = tmp_path / "history"
    settings.HISTORY_DIR.mkdir()
    job, _ = actions.submit(owner, GOOD)
    batches = list(generate_run(2, 9))
    batches.append(batch(5.0, step(0, 10, 5.0, loss=None, not_finite="loss is nan"), step(1, 10, 5.5, step_s=0.75)))
    batches.append(batch(5.5, {"kind": "eval", "rank": 0, "time": BEGAN + 5.5, "step": 10, "loss": 4.5}))
    record_batches(settings.HISTORY_DIR, batches, job.id)
    return job.id


def test_huge_step_number_does_not_remove_other_points(
    recorded: str, owner: User, api: Api, tmp_path: Path, settings: Any
) -> None:
    settings.HISTORY_DIR = tmp_path / "far"
    settings.HISTORY_DIR.mkdir()
    record_batches(settings.HISTORY_DIR, [*generate_run(2, 9), batch(6.0, step(0, 2**63 - 1, 6.0, loss=1.0))], recorded)
    found = read(api(owner).get(f"/api/v1/jobs/{recorded}/tensorboard"), tmp_path)
    for curve in ("train/loss", "step_seconds/rank_0", "exposed_seconds/dp"):
        assert [point.step for point in found.Scalars(curve)] == [*range(1, 10), 2**63 - 1]


def test_rank_without_an_axis_counts_as_not_blocked(
    recorded: str, owner: User, api: Api, tmp_path: Path, settings: Any
) -> None:
    settings.HISTORY_DIR = tmp_path / "axes"
    settings.HISTORY_DIR.mkdir()
    parts = {"data": 0.0, "optimizer": 0.0, "hidden": {}}
    both, one = (parts | {"exposed": exposed} for exposed in ({"dp": 0.5, "pp": 0.25}, {"dp": 0.25}))
    batch_data = batch(1.0, step(0, 1, 1.0, parts=both), step(1, 1, 1.0, parts=one))
    record_batches(settings.HISTORY_DIR, [batch_data], recorded)
    found = read(api(owner).get(f"/api/v1/jobs/{recorded}/tensorboard"), tmp_path)
    [dp], [pp] = (found.Scalars(f"exposed_seconds/{axis}") for axis in ("dp", "pp"))
    assert (dp.value, pp.value) == (0.375, 0.125)


@pytest.mark.parametrize("path", ["tensorboard", "history/steps?format=csv", "history/steps?format=parquet"])
def test_reports_full_disk_when_a_file_does_not_fit(
    path: str, recorded: str, owner: User, api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mount_full_disk(tmp_path / "disk") as disk:
        monkeypatch.setattr(query, "get_spill_folder", lambda: disk)
        answer = api(owner).get(f"/api/v1/jobs/{recorded}/{path}")
        left = [one.name for one in disk.iterdir()]
    assert (answer.status_code, answer["Content-Type"]) == (503, "application/problem+json")
    assert "The disk of the board is full." in answer.json()["detail"]
    assert left == ["filling"]


def test_page_reports_full_disk(
    recorded: str, owner: User, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.force_login(owner)
    client.raise_request_exception = False
    with mount_full_disk(tmp_path / "disk") as disk:
        monkeypatch.setattr(query, "get_spill_folder", lambda: disk)
        answer = client.get(f"/jobs/{recorded}/history/tensorboard/")
    assert (answer.status_code, "The disk of the board is full." in answer.content.decode()) == (503, True)


def read(answer: Any, folder: Path) -> EventAccumulator:
    name = answer["Content-Disposition"].split('"')[1]
    (folder / name).write_bytes(b"".join(answer.streaming_content))
    found = EventAccumulator(str(folder / name), size_guidance={"scalars": 0})
    found.Reload()
    return found


def test_tensorboard_reads_the_exported_curves(
    recorded: str, owner: User, stranger: User, api: Api, tmp_path: Path
) -> None:
    answer = api(owner).get(f"/api/v1/jobs/{recorded}/tensorboard")
    assert (answer.status_code, answer["Content-Type"]) == (200, "application/octet-stream")
    found = read(answer, tmp_path)
    assert {*found.Tags()["scalars"]} == {
        *(f"train/{name}" for name in ("loss", "grad_norm", "learning_rate", "step_seconds", "tokens_per_second")),
        *("validation/loss", "exposed_seconds/dp", "step_seconds/rank_0", "step_seconds/rank_1"),
        *("payload_bytes_per_second/dp", "payload_bytes_per_second/world"),
    }
    losses = found.Scalars("train/loss")
    assert [(point.step, round(point.value, 5)) for point in losses] == [(n, 5 - n / 100) for n in range(1, 10)]
    assert losses[0].wall_time == BEGAN + 0.5
    assert found.Scalars("train/step_seconds")[-1].value == 0.75, "its slowest rank's"
    assert [point.value for point in found.Scalars("validation/loss")] == [4.5]
    sent = sum(point.value for point in found.Scalars("payload_bytes_per_second/dp"))
    assert sent == 2 * 1000 * (90 + 9), "both ranks, both collectives: all bytes of the run"
    assert b"global_batch" in found.Tensors("spec/text_summary")[0].tensor_proto.string_val[0]
    assert api(stranger).get(f"/api/v1/jobs/{recorded}/tensorboard").status_code == 404
    assert api(owner).get(f"/api/v1/jobs/{recorded}/tensorboard?attempt=7").status_code == 404
    assert api(owner).get(f"/api/v1/jobs/{recorded}/tensorboard?attempt=x").status_code == 400


def test_long_run_is_thinned(
    recorded: str, owner: User, api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "MAX_POINTS", 4)
    found = read(api(owner).get(f"/api/v1/jobs/{recorded}/tensorboard"), tmp_path)
    assert [point.step for point in found.Scalars("train/step_seconds")] == [3, 6, 9]
    assert len(found.Scalars("payload_bytes_per_second/dp")) <= 4


def test_page_downloads_the_event_file(
    recorded: str, owner: User, stranger: User, client: Client, tmp_path: Path
) -> None:
    client.force_login(owner)
    assert read(client.get(f"/jobs/{recorded}/history/tensorboard/"), tmp_path).Tags()["scalars"]
    client.force_login(stranger)
    assert client.get(f"/jobs/{recorded}/history/tensorboard/").status_code == 404


@pytest.mark.slow
def test_mlflow_stores_an_attempt_once(recorded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setattr(exports, "METRICS_PER_REQUEST", 7)
    Attempt.objects.create(job_id=recorded, number=1, exit={"outcome": "failed"})
    out = io.StringIO()
    to = f"file://{tmp_path / 'mlruns'}"
    call_command("export_mlflow", recorded, to=to, stdout=out)
    client = MlflowClient(tracking_uri=to)
    run = client.get_run(out.getvalue().strip())
    assert run.info.status == "FAILED"
    assert run.info.start_time == int(1000 * (BEGAN + 0.5)) or run.info.start_time == int(1000 * BEGAN)
    assert run.data.params["layout.dp"] == str(Job.objects.get().spec["layout"]["dp"])
    assert run.data.tags["meshboard.client"] == recorded
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(each.step, round(each.value, 5)) for each in losses] == [(n, 5 - n / 100) for n in range(1, 10)]
    assert len(client.get_metric_history(run.info.run_id, "step_seconds/rank_1")) == 10
    with pytest.raises(CommandError, match="was already exported as MLflow run"):
        call_command("export_mlflow", recorded, to=to)
    with pytest.raises(CommandError, match="does not exist"):
        call_command("export_mlflow", "nobodys", to=to)


@pytest.mark.slow
def test_rejected_mlflow_export_leaves_no_data(recorded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    to = f"file://{tmp_path / 'mlruns'}"
    with pytest.raises(CommandError, match=r"^http://127\.0\.0\.1:1 rejected the export: .*Connection refused"):
        call_command("export_mlflow", recorded, to="http://127.0.0.1:1")
    with pytest.raises(CommandError, match=r"rejected the export: .*maintenance mode"):
        call_command("export_mlflow", recorded, to=to)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with monkeypatch.context() as broken:

        def full(*_: object, **__: object) -> None:
            raise MlflowException("the disk is full")

        broken.setattr(MlflowClient, "log_batch", full)
        with pytest.raises(CommandError, match="the disk is full"):
            call_command("export_mlflow", recorded, to=to)
    call_command("export_mlflow", recorded, to=to)


def test_command_names_the_missing_mlflow_extra(recorded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(CommandError, match=r"pip install 'meshboard\[mlflow\]'"):
        call_command("export_mlflow", recorded, to="file:///nowhere")
