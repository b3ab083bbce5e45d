"""The history of a job for pages, in the formats of REST."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Literal

from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.views.decorators.http import require_GET

from jobs.api.errors import make_page_problem_response
from jobs.api.history_views import as_event_file, as_file
from jobs.api.problems import build_problem
from jobs.core.access import find_job
from jobs.pages.view_helpers import refuse_while_busy
from jobs.planning.planner_processes import BusyError
from jobs.runs.history.queries import tables
from jobs.runs.history.queries.snapshot import get_snapshot as read_snapshot
from jobs.runs.history.queries.step_breakdown import NoStepsError, explain_slow_steps, parse_step_range
from jobs.runs.history.queries.tables import BadQueryError, NoTableError, parse_table_query
from jobs.runs.history.store.folder import NoHistoryError
from planner.facts.validation import Problem, SpecError

# The field of a request by the error that a missing value raises
MISSING_FIELDS: dict[type[Exception], str] = {NoTableError: "table", NoHistoryError: "attempt", NoStepsError: "from"}


def catch_query_errors(view: Callable[..., HttpResponseBase]) -> Callable[..., HttpResponseBase]:
    """Decorate a view to return errors as REST does."""

    @wraps(view)
    def respond(request: HttpRequest, job_id: str, **kwargs: str) -> HttpResponseBase:
        try:
            return view(request, job_id, **kwargs)
        except BadQueryError as error:
            return make_page_problem_response(build_problem(400, error.problems, "query"))
        except SpecError as error:
            return make_page_problem_response(build_problem(422, error.problems, "query"))
        except (NoTableError, NoHistoryError, NoStepsError) as error:
            place: Literal["path", "query"] = "path" if isinstance(error, NoTableError) else "query"
            return make_page_problem_response(
                build_problem(404, [Problem(MISSING_FIELDS[type(error)], str(error))], place)
            )
        except BusyError as error:
            return refuse_while_busy(error)

    return respond


@require_GET
def index(request: HttpRequest, job_id: str) -> HttpResponse:
    """List attempts with their tables."""
    job = find_job(request.user, job_id)
    return JsonResponse({"job": job.id, "attempts": tables.list_attempts(job.id)})


@require_GET
@catch_query_errors
def snapshot(request: HttpRequest, job_id: str) -> HttpResponse:
    """Return the snapshot of an attempt for the job page, or 204 if no history is stored."""
    job = find_job(request.user, job_id)
    attempt = parse_table_query("marks", dict(request.GET.lists()), "attempt").attempt or job.attempt
    try:
        return JsonResponse(read_snapshot(job.id, attempt))
    except NoHistoryError:
        return HttpResponse(status=204)


@require_GET
@catch_query_errors
def slow_steps(request: HttpRequest, job_id: str) -> HttpResponse:
    """Compare the steps `from` to `to` with the other steps."""
    job = find_job(request.user, job_id)
    attempt, first, last = parse_step_range(dict(request.GET.lists()))
    return JsonResponse(explain_slow_steps(job.id, attempt or job.attempt, first, last))


@require_GET
@catch_query_errors
def table(request: HttpRequest, job_id: str, table: str) -> HttpResponseBase:
    """Return rows or bins of a table, as JSON or as a file."""
    job = find_job(request.user, job_id)
    query = parse_table_query(table, dict(request.GET.lists()))
    attempt = query.attempt or job.attempt
    if query.format == "json":
        return JsonResponse(tables.read_rows(job.id, attempt, table, query))
    return as_file(job, attempt, table, query)


@require_GET
@catch_query_errors
def tensorboard(request: HttpRequest, job_id: str) -> HttpResponseBase:
    """Return the curves of an attempt as a TensorBoard event file."""
    job = find_job(request.user, job_id)
    attempt = parse_table_query("marks", dict(request.GET.lists()), "attempt").attempt or job.attempt
    return as_event_file(job, attempt)
