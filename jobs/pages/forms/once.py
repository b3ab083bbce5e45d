"""Start one job per form, even if the browser sends the form several times."""

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

FIELD = "form_key"  # created with the page by `{% form_key %}`


def submitted(request: HttpRequest, data: Any, *, check_of: Job | None = None) -> HttpResponse:
    """Queue the job of a form and redirect to it. A repeated form redirects to the job that it started before.

    Args:
        check_of: The run that the job is a reference check of.

    Raises:
        SpecError: as `actions.submit`.
        BusyError: as `actions.submit`.
    """
    job, queued = actions.submit(cast(User, request.user), data, key=_key(request, data), check_of=check_of)
    if queued is None:
        messages.info(request, "The form was sent more than once, but only this job was created.")
    return redirect("job-detail", job.id)


def _key(request: HttpRequest, data: Any) -> str | None:
    """Return a key of the form and its content. A form with other content starts another job."""
    drawn = request.POST.get(FIELD)
    if not drawn:
        return None
    content = json.dumps([drawn, data], sort_keys=True)
    return f"form {hashlib.sha256(content.encode()).hexdigest()}"
