"""Export the curves of an attempt to TensorBoard event files and to MLflow."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from jobs.models import Attempt, Job
from jobs.runs.history.queries.metrics import list_series, read_curve
from jobs.runs.history.recording.attempt_recorder import get_outcome
from jobs.runs.history.store.query import HistoryTables, query_history, query_to_file
from planner.facts.kinds import drop_unused_fields

MAX_POINTS = 10_000  # per curve: longer curves have every second, third, .. step
MAX_RANK_CURVES = 64


class CurvePoint(NamedTuple):
    """Hold a value of a curve. `step`: the completed step, or seconds after the start for curves over time."""

    curve: str
    step: int
    time: float  # Unix seconds
    value: float


# By order, not by number: one step with a huge number would leave no others.
_SAMPLED_STEPS = """step IN (SELECT step FROM (
    SELECT step, row_number() OVER (ORDER BY step) AS nth FROM (SELECT DISTINCT step FROM steps)) WHERE nth % ? = 0)
"""
# Per step over ranks: the loss of ranks that know it, and the time of the slowest rank.
_STEP_QUERY = f"""
SELECT step, max(time), avg(loss), avg(grad_norm), avg(learning_rate), max(step_s)::DOUBLE,
       max(tokens) / max(step_s)::DOUBLE
FROM steps WHERE {_SAMPLED_STEPS} GROUP BY step ORDER BY step
"""
_STEP_CURVES = ("loss", "grad_norm", "learning_rate", "step_seconds", "tokens_per_second")
_RANK_QUERY = (
    f"SELECT step, time, rank, step_s::DOUBLE FROM steps WHERE {_SAMPLED_STEPS} AND rank < ? ORDER BY step, rank"
)
# Mean over ranks that reported axes. A rank that does not name an axis was not blocked by it.
_EXPOSED_QUERY = f"""
SELECT step, max(time), entry.key, (sum(entry.value) / max(ranks))::DOUBLE
FROM (SELECT step, time, ranks, unnest(map_entries(exposed)) AS entry
    FROM (SELECT *, count(exposed) OVER (PARTITION BY step) AS ranks FROM steps WHERE {_SAMPLED_STEPS}))
GROUP BY step, entry.key ORDER BY step, entry.key
"""
_VALIDATION_QUERY = "SELECT step, time, value FROM marks WHERE kind = 'validation' ORDER BY step"
_TRAFFIC_QUERY = """
SELECT (second // ? - ?) * ? AS since, axis, sum(payload_bytes)::DOUBLE / ?
FROM traffic GROUP BY since, axis ORDER BY since, axis
"""


def read_points(tables: HistoryTables) -> Iterator[CurvePoint]:
    """Yield the finite points of every curve, in the order of steps."""
    for point in _read_points(tables):
        if point.value is not None and math.isfinite(point.value):
            yield point


def _read_points(tables: HistoryTables) -> Iterator[CurvePoint]:
    [(count,)] = tables.fetch_rows("SELECT count(DISTINCT step) FROM steps")
    stride = max(1, math.ceil(count / MAX_POINTS))
    for step, time, *values in tables.fetch_rows(_STEP_QUERY, stride):
        for name, value in zip(_STEP_CURVES, values, strict=True):
            yield CurvePoint(f"train/{name}", step, time, value)
    for step, time, value in tables.fetch_rows(_VALIDATION_QUERY):
        yield CurvePoint("validation/loss", step, time, value)
    for series in list_series(tables):
        if series.rank < MAX_RANK_CURVES:
            curve = read_curve(tables, series, MAX_POINTS)
            suffix = f"/rank_{series.rank}" if series.rank else ""
            for step, time, value in zip(curve["step"], curve["time"], curve["value"], strict=True):
                if value is not None:
                    yield CurvePoint(f"script/{series.name}{suffix}", step, time, value)
    for step, time, axis, value in tables.fetch_rows(_EXPOSED_QUERY, stride):
        yield CurvePoint(f"exposed_seconds/{axis}", step, time, value)
    for step, time, rank, value in tables.fetch_rows(_RANK_QUERY, stride, MAX_RANK_CURVES):
        yield CurvePoint(f"step_seconds/rank_{rank}", step, time, value)
    yield from _read_traffic(tables)


def _read_traffic(tables: HistoryTables) -> Iterator[CurvePoint]:
    """Yield payload bytes per second over all ranks."""
    bins = tables.get_traffic_bins(MAX_POINTS)
    if bins is None:
        return
    width, start = bins.width_s, bins.start
    for since, axis, value in tables.fetch_rows(_TRAFFIC_QUERY, width, start, width, width):
        yield CurvePoint(f"payload_bytes_per_second/{axis}", since, start * width + since, value)


EVENT_FILE_VERSION = "brain.Event:2"


def make_event_file(job: str, attempt: int, spec: dict[str, Any]) -> BinaryIO:
    """Return a TensorBoard event file that is deleted once it is closed. Raise the errors of `query_history`."""
    return query_to_file(job, attempt, lambda tables, path: _write_events(tables, spec, path))


def get_event_file_name(job: str, attempt: int) -> str:
    """Return a name with the part that TensorBoard searches for."""
    return f"{job}-{attempt}.events.out.tfevents"


def _write_events(tables: HistoryTables, spec: dict[str, Any], path: Path) -> None:
    began = float(tables.manifest["first"] or 0.0)
    tensor = TensorProto(dtype=DT_STRING, string_val=[f"```\n{json.dumps(spec, indent=2)}\n```".encode()])
    tensor.tensor_shape.dim.add(size=1)
    metadata = create_summary_metadata(display_name="spec", description="")
    spec_summary = Summary(value=[Summary.Value(tag="spec/text_summary", metadata=metadata, tensor=tensor)])
    with path.open("wb") as out:  # again, if the files of the history were replaced
        writer = RecordWriter(out)
        writer.write(Event(wall_time=began, file_version=EVENT_FILE_VERSION).SerializeToString())
        writer.write(Event(wall_time=began, step=0, summary=spec_summary).SerializeToString())
        for curve, step, time, value in read_points(tables):
            summary = Summary(value=[Summary.Value(tag=curve, simple_value=value)])
            writer.write(Event(wall_time=time, step=step, summary=summary).SerializeToString())


METRICS_PER_REQUEST = 1000  # https://mlflow.org/docs/latest/rest-api.html#log-batch
PARAMS_PER_REQUEST = 100
MAX_VALUE_LENGTH = 500
OUTCOMES = {"succeeded": "FINISHED", "cancelled": "KILLED"}
# Defaults for MLflow's client, which otherwise retries an unreachable server for five minutes.
CLIENT_TIMEOUTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
JOB_TAG, ATTEMPT_TAG = "meshboard.client", "meshboard.attempt"


class MlflowNotInstalledError(Exception):
    """The extra `meshboard[mlflow]` is not installed."""


class AlreadyExportedError(Exception):
    """The attempt was already exported. A second export would duplicate its metrics."""


class ExportRejectedError(Exception):
    """The server or store cannot be reached or rejected the attempt. No data of the attempt remains there."""


def export_to_mlflow(job: Job, attempt: int, to: str, experiment: str) -> str:
    """Export an attempt to the server or store `to`. Return the id of its MLflow run.

    Raises:
        MlflowNotInstalledError, AlreadyExportedError, ExportRejectedError, NoHistoryError, BusyError
    """
    for name, value in CLIENT_TIMEOUTS.items():
        os.environ.setdefault(name, value)
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    except ImportError:
        raise MlflowNotInstalledError("MLflow is not installed. Run pip install 'meshboard[mlflow]'") from None
    points = query_history(job.id, attempt, lambda tables: list(read_points(tables)))
    try:
        return _create_run(MlflowClient(tracking_uri=to), job, attempt, points, experiment)
    except MlflowException as error:
        raise ExportRejectedError(
            f"The MLflow server {to} rejected the export: {str(error).strip().splitlines()[0][:1000]}"
        ) from None


def _create_run(client: Any, job: Job, attempt: int, points: Sequence[CurvePoint], experiment: str) -> str:
    known_experiment = client.get_experiment_by_name(experiment)
    experiment_id = known_experiment.experiment_id if known_experiment else client.create_experiment(experiment)
    query = f"tags.`{JOB_TAG}` = '{job.id}' AND tags.`{ATTEMPT_TAG}` = '{attempt}'"
    if runs := client.search_runs([experiment_id], query):
        raise AlreadyExportedError(
            f"Attempt {attempt} of job {job.id} was already exported as MLflow run {runs[0].info.run_id}."
        )
    began = int(1000 * min((point.time for point in points), default=job.created.timestamp()))
    tags = {
        JOB_TAG: job.id,
        ATTEMPT_TAG: str(attempt),
        "meshboard.project": job.project,
        "mlflow.user": job.owner.username,
    }
    run: str = client.create_run(experiment_id, start_time=began, tags=tags, run_name=job.name).info.run_id
    try:
        _log_run(client, run, job, points)
    except BaseException:
        with contextlib.suppress(Exception):  # otherwise a second try finds an incomplete run
            client.delete_run(run)
        raise
    row = Attempt.objects.filter(job=job, number=attempt).values_list("pk", flat=True).first()
    outcome = get_outcome(row).outcome if row is not None else None
    last = int(1000 * max((point.time for point in points), default=began / 1000))
    if outcome is not None:
        client.set_terminated(run, OUTCOMES.get(outcome, "FAILED"), last)
    return run


def _log_run(client: Any, run: str, job: Job, points: Iterable[CurvePoint]) -> None:
    from mlflow.entities import Metric, Param

    params = [Param(name, value[:MAX_VALUE_LENGTH]) for name, value in flatten_spec(drop_unused_fields(job.spec))]
    for first in range(0, len(params), PARAMS_PER_REQUEST):
        client.log_batch(run, params=params[first : first + PARAMS_PER_REQUEST])
    metrics = (Metric(point.curve, point.value, int(1000 * point.time), point.step) for point in points)
    while batch := list(islice(metrics, METRICS_PER_REQUEST)):
        client.log_batch(run, metrics=batch)


def flatten_spec(spec: Mapping[str, Any], under: str = "") -> Iterator[tuple[str, str]]:
    """Yield the fields of a spec as MLflow parameters: `layout.dp` and its value as text."""
    for name, value in spec.items():
        if isinstance(value, Mapping):
            yield from flatten_spec(value, f"{under}{name}.")
        elif value is not None:
            yield f"{under}{name}", str(value)
