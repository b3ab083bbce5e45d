"""Store the reasons that jobs wait, for thousands of jobs at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from django.db import transaction
from django.db.models import CharField, F, Func, TextField, Value

from jobs.models import Job
from jobs.queue import lifecycle
from jobs.queue.scheduling.snapshot import Queued

CHUNK = 500  # jobs written in one transaction: so long do others wait, where a database has one writer


MOST = 2000  # written in one pass: the next one goes on


def explain(queue: list[Queued], reasons: Mapping[str, str]) -> None:
    """Write reasons that are new, as many as a pass has time for, in transactions short enough for everybody else."""
    news = {}
    for queued in queue:
        reason = queued.bar or reasons.get(queued.job.id, queued.reason)
        if reason != queued.reason:
            news[queued.job.id] = reason
    waiting = list(news)[:MOST]
    for begin in range(0, len(waiting), CHUNK):
        with transaction.atomic():
            jobs = lifecycle.lock_queued_ids(waiting[begin : begin + CHUNK])
            Job.objects.filter(id__in=jobs).update(wait_reason=TextOf({job: news[job] for job in jobs}, "id"))
    lifecycle.announce(*waiting)


class TextOf(Func):
    """The text that a map has for a column. The map goes as one JSON: of a condition for each row, Django and the
    database would both make more work than of writing the rows."""

    output_field = CharField()

    def __init__(self, texts: Mapping[str, str], column: str) -> None:
        super().__init__(Value(json.dumps(texts), TextField()), F(column))

    def as_postgresql(self, compiler: Any, connection: Any, **extra: Any) -> tuple[str, Any]:
        return self.as_sql(compiler, connection, template="(%(expressions)s)", arg_joiner="::jsonb ->> ", **extra)

    def as_sqlite(self, compiler: Any, connection: Any, **extra: Any) -> tuple[str, Any]:
        return self.as_sql(compiler, connection, function="json_extract", arg_joiner=", '$.' || ", **extra)
