"""Admin of jobs. Actions use `jobs.queue.actions`, and the status is read-only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import admin, messages
from django.db.models import Field, QuerySet
from django.http import HttpRequest
from unfold.admin import TabularInline
from unfold.contrib.filters.admin import ChoicesDropdownFilter
from unfold.decorators import display

from jobs.admin.shared import OwnerFilter, SingleColumnAdmin
from jobs.core.kinds import format_layout
from jobs.models import Attempt, Job, StateChange, Status
from jobs.queue import actions

BADGES = {
    Status.QUEUED: "info",
    Status.STARTING: "info",
    Status.RUNNING: "success",
    Status.SUCCEEDED: "success",
    Status.UNREACHABLE: "warning",
    Status.CANCELLING: "warning",
    Status.FAILED: "danger",
    Status.LOST: "danger",
}


class ReadOnlyInline(TabularInline):
    extra = 0
    can_delete = False

    def has_add_permission(self, *_args: Any) -> bool:
        return False

    def has_change_permission(self, *_args: Any) -> bool:
        return False


class HistoryInline(ReadOnlyInline):
    model = StateChange
    fields = readonly_fields = ["attempt", "status", "reason", "at"]


class AttemptInline(ReadOnlyInline):
    model = Attempt
    fields = readonly_fields = ["number", "where", "created"]

    def where(self, attempt: Attempt) -> str:
        """Return the hosts in the order of their ranks."""
        return attempt.format_hosts()


@admin.register(Job)
class JobAdmin(SingleColumnAdmin):
    """Jobs in the order of the queue."""

    column = "priority"
    list_display = ["name", "id", "owner", "state", "priority", "layout", "wait_reason", "created"]
    list_editable = ["priority"]
    list_filter = [("status", ChoicesDropdownFilter), ("owner", OwnerFilter)]
    list_filter_submit = True  # one form keeps the values of both filters
    list_select_related = ["owner"]
    list_max_show_all = list_per_page = 25  # each row has a form, so 100 rows take a second
    show_full_result_count = False
    search_fields = ["id", "name", "owner__username"]
    readonly_fields = [
        "id",
        "owner",
        "name",
        "status",
        "attempt",
        "wait_reason",
        "spec",
        "estimate",
        "created",
        "changed",
    ]
    inlines = [HistoryInline, AttemptInline]
    actions = ["cancel", "requeue"]

    @display(description="status", label=BADGES)
    def state(self, job: Job) -> tuple[str, str]:
        return job.status, job.get_status_display()

    def layout(self, job: Job) -> str:
        return format_layout(job.spec)

    def formfield_for_dbfield(self, db_field: Field[Any, Any], request: HttpRequest, **kwargs: Any) -> Any:
        """Add a label for screen readers to the fields of the list."""
        field = super().formfield_for_dbfield(db_field, request, **kwargs)
        if field is not None and db_field.name in self.list_editable:
            field.widget.attrs["aria-label"] = db_field.verbose_name
        return field

    def get_queryset(self, request: HttpRequest) -> QuerySet[Job]:
        jobs: QuerySet[Job] = super().get_queryset(request)
        return jobs.defer("estimate", "hardware")  # large columns

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        # A job that holds slots must be cancelled first: deleting its row would orphan its processes.
        return obj is not None and obj.status in ("succeeded", "failed", "lost", "cancelled")

    @admin.action(permissions=["change"], description="Cancel")
    def cancel(self, request: HttpRequest, jobs: QuerySet[Job]) -> None:
        self._apply(request, jobs, actions.cancel, "cancelled")

    @admin.action(permissions=["change"], description="Queue again")
    def requeue(self, request: HttpRequest, jobs: QuerySet[Job]) -> None:
        self._apply(request, jobs, _requeue, "queued again")

    def _apply(self, request: HttpRequest, jobs: QuerySet[Job], act: Callable[[Job, str], bool], done: str) -> None:
        names = [job.name for job in jobs if act(job, request.user.get_username())]
        self.message_user(request, f"{len(names)} of {len(jobs)} {done}", messages.SUCCESS)


def _requeue(job: Job, by: str) -> bool:
    try:
        return actions.requeue(job, by)
    except actions.DisprovedError:
        return False
