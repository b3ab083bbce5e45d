"""Export the curves and the spec of an attempt to MLflow: manage.py export_mlflow JOB --to http://mlflow:5000"""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from jobs.models import Job
from jobs.planning.planner_processes import BusyError
from jobs.runs.history.exports import (
    AlreadyExportedError,
    ExportRejectedError,
    MlflowNotInstalledError,
    export_to_mlflow,
)
from jobs.runs.history.store.folder import NoHistoryError


class Command(BaseCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("job", help="id of the job")
        parser.add_argument("--attempt", type=int, help="default: the current attempt")
        parser.add_argument("--to", required=True, help="tracking URI of the MLflow server")
        parser.add_argument("--experiment", default="", help="default: meshboard/PROJECT")

    def handle(self, *_args: Any, **options: Any) -> None:
        job = Job.objects.select_related("owner").filter(id=options["job"]).first()
        if job is None:
            raise CommandError(f"Job {options['job']} does not exist.")
        experiment = options["experiment"] or f"meshboard/{job.project}"
        try:
            self.stdout.write(export_to_mlflow(job, options["attempt"] or job.attempt, options["to"], experiment))
        except (MlflowNotInstalledError, AlreadyExportedError, ExportRejectedError, NoHistoryError, BusyError) as error:
            raise CommandError(str(error)) from None
