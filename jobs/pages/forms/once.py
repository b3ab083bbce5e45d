"""A form that starts a job starts one, however often the browser sends it."""

from __future__ import annotations

import hashlib
import json
from typing import Any, cast

from django.contrib import messages
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect

from jobs.models import Job
from jobs.queue import actions

FIELD = "form_key"  # drawn when the form is (`{% form_key %}`)


def submitted(request: HttpRequest, data: Any, *, check_of: Job | None = None) -> HttpResponse:
    """Queue what a form asks for, and on to the job: the one it made before, where this form sent this before.

    `check_of`: as `actions.submit`.

    Raises:
        SpecError: as `actions.submit`.
        BusyError: as `actions.submit`.
    """
    job, queued = actions.submit(cast(User, request.user), data, key=_key(request, data), check_of=check_of)
    if queued is None:
        messages.info(request, "This form was sent more than once: this is the one job that it made.")
    return redirect("job-detail", job.id)


def _key(request: HttpRequest, data: Any) -> str | None:
    """Of the form and what it says: what was changed in it since is another job, never a key used again."""
    drawn = request.POST.get(FIELD)
    if not drawn:
        return None
    told = json.dumps([drawn, data], sort_keys=True)
    return f"form {hashlib.sha256(told.encode()).hexdigest()}"
