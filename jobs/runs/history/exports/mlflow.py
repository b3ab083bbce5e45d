"""An attempt's curves as a run of MLflow's, where it is installed: `pip install 'meshboard[mlflow]'`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from jobs.models import Attempt, Job
from jobs.runs.history.exports.scalars import Point, scalars
from jobs.runs.history.recording.ended import ended
from jobs.runs.history.store.query import ask
from planner.facts.kinds import drop_unused_fields

BATCH = 1000  # metrics that a server takes at once: https://mlflow.org/docs/latest/rest-api.html#log-batch
MOST_PARAMS = 100  # that it takes at once
LONGEST_VALUE = 500
OUTCOMES = {"succeeded": "FINISHED", "cancelled": "KILLED"}
# Of MLflow's client, where nobody set them: by itself it asks a server that is away for five minutes.
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
JOB, ATTEMPT = "meshboard.job", "meshboard.attempt"


class NotInstalledError(Exception):
    """MLflow is an extra."""


class ExportedError(Exception):
    """The attempt is there already: its metrics would be there twice."""


class NotTakenError(Exception):
    """The server or store cannot be reached, or does not take the attempt: nothing of it is there."""


def export(job: Job, attempt: int, to: str, experiment: str) -> str:
    """Write an attempt to the server or store `to`; returns the id of its run there.

    Raises:
        NotInstalledError, ExportedError, NotTakenError, GoneError, BusyError
    """
    for name, value in PATIENCE.items():
        os.environ.setdefault(name, value)
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    except ImportError:
        raise NotInstalledError("MLflow is not installed. Run pip install 'meshboard[mlflow]'") from None
    points = ask(job.id, attempt, lambda tables: list(scalars(tables)))
    try:
        return _write(MlflowClient(tracking_uri=to), job, attempt, points, experiment)
    except MlflowException as error:
        raise NotTakenError(
            f"The MLflow server {to} rejected the export: {str(error).strip().splitlines()[0][:1000]}"
        ) from None


def _write(client: Any, job: Job, attempt: int, points: Sequence[Point], experiment: str) -> str:
    found = client.get_experiment_by_name(experiment)
    where = found.experiment_id if found else client.create_experiment(experiment)
    same = f"tags.`{JOB}` = '{job.id}' AND tags.`{ATTEMPT}` = '{attempt}'"
    if there := client.search_runs([where], same):
        raise ExportedError(
            f"Attempt {attempt} of job {job.id} was already exported as MLflow run {there[0].info.run_id}."
        )
    began = int(1000 * min((point.time for point in points), default=job.created.timestamp()))
    tags = {JOB: job.id, ATTEMPT: str(attempt), "meshboard.project": job.project, "mlflow.user": job.owner.username}
    run: str = client.create_run(where, start_time=began, tags=tags, run_name=job.name).info.run_id
    try:
        _fill(client, run, job, points)
    except BaseException:
        with contextlib.suppress(Exception):  # else a second try would find half of it there
            client.delete_run(run)
        raise
    row = Attempt.objects.filter(job=job, number=attempt).values_list("pk", flat=True).first()
    outcome = ended(row).outcome if row is not None else None
    last = int(1000 * max((point.time for point in points), default=began / 1000))
    if outcome is not None:
        client.set_terminated(run, OUTCOMES.get(outcome, "FAILED"), last)
    return run


def _fill(client: Any, run: str, job: Job, points: Iterable[Point]) -> None:
    from mlflow.entities import Metric, Param

    params = [Param(name, value[:LONGEST_VALUE]) for name, value in flat(drop_unused_fields(job.spec))]
    for first in range(0, len(params), MOST_PARAMS):
        client.log_batch(run, params=params[first : first + MOST_PARAMS])
    told = (Metric(point.curve, point.value, int(1000 * point.time), point.step) for point in points)
    while batch := list(islice(told, BATCH)):
        client.log_batch(run, metrics=batch)


def flat(spec: Mapping[str, Any], under: str = "") -> Iterator[tuple[str, str]]:
    """A spec's fields as MLflow has parameters: `layout.dp`, each as text."""
    for name, value in spec.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{under}{name}.")
        elif value is not None:
            yield f"{under}{name}", str(value)
