"""Admin of hosts, failed events, pools, reservations, and projects."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import QuerySet
from django.forms import ModelForm
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from unfold.admin import ModelAdmin
from unfold.decorators import display

from jobs.admin.shared import AuditedAdmin, SingleColumnAdmin
from jobs.models import DEFAULT_PROJECT, DeadLetter, Host, Member, Pool, Project, Reservation
from jobs.people.projects import JOBS_REMAIN, delete_project_data, has_jobs
from jobs.queue import actions
from jobs.queue.inbound import event_handlers
from jobs.queue.scheduling.snapshot import count_free_slots
from jobs.queue.staff_actions import set_drained
from planner.facts.validation import format_count


@admin.register(Host)
class HostAdmin(SingleColumnAdmin):
    """Hosts. Staff can drain hosts, and mark silent hosts as lost."""

    column = "drained"

    list_display = ["name", "device_name", "slots", "free", "drained", "last_seen", "dead_letters"]
    readonly_fields = ["name", "slots", "device", "device_name", "memory_bytes", "boot_id", "note", "last_seen"]
    actions = ["drain", "undrain", "give_up"]

    search_fields = ["name"]
    list_filter = ["drained", "device"]

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        """Add the failed events and free slots of all listed hosts."""
        found = super().get_changelist_instance(request)
        hosts = list(found.result_list)
        counts, free = event_handlers.count_dead_letters(host.name for host in hosts), count_free_slots()
        for host in hosts:
            host.free_slots = free.get(host.pk, 0)
            host.num_dead_letters = counts[host.name]
        found.result_list = hosts
        return found

    @display
    def free(self, host: Any) -> str:
        return str(host.free_slots)

    @display(description="events that failed")
    def dead_letters(self, host: Any) -> str:
        return str(host.num_dead_letters)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    @admin.action(permissions=["change"], description="Drain hosts")
    def drain(self, request: HttpRequest, hosts: QuerySet[Host]) -> None:
        self.message_user(request, f"{self._set_drained(request, hosts, True)} drained", messages.SUCCESS)

    @admin.action(permissions=["change"], description="Undrain hosts")
    def undrain(self, request: HttpRequest, hosts: QuerySet[Host]) -> None:
        self.message_user(request, f"{self._set_drained(request, hosts, False)} undrained", messages.SUCCESS)

    def _set_drained(self, request: HttpRequest, hosts: QuerySet[Host], drained: bool) -> int:
        return sum(set_drained(host, drained, request.user.get_username()) for host in hosts)

    @admin.action(description="Mark hosts and their jobs as lost", permissions=["change"])
    def give_up(self, request: HttpRequest, hosts: QuerySet[Host]) -> HttpResponse | None:
        if "confirmed" not in request.POST:
            return self._confirm(request, hosts)
        for host in hosts:
            try:
                lost = actions.mark_host_lost(host, request.user.get_username())
            except actions.HostConnectedError as error:
                self.message_user(request, str(error), messages.ERROR)
            else:
                text = f"Marked host {host.name} and {format_count(lost, 'attempt')} as lost"
                self.message_user(request, text, messages.SUCCESS)
        return None

    def _confirm(self, request: HttpRequest, hosts: QuerySet[Host]) -> HttpResponse:
        members = Member.objects.filter(host__in=hosts, ended__isnull=True).select_related("attempt__job")
        context = {
            **self.admin_site.each_context(request),
            "title": "Mark hosts as lost",
            "hosts": hosts,
            "members": members,
            "opts": self.model._meta,
        }
        return render(request, "admin/give_up_hosts.html", context)


@admin.register(DeadLetter)
class DeadLetterAdmin(ModelAdmin):
    """Events that failed to be processed."""

    list_display = ["created", "sender", "reason", "num_bytes"]
    list_filter = ["sender"]
    search_fields = ["sender", "reason"]
    readonly_fields = ["created", "entry", "sender", "reason", "num_bytes", "body"]

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(Pool)
class PoolAdmin(AuditedAdmin):
    search_fields = ["name"]  # used by the form of a reservation
    fields = ["name", "labels", "paused"]
    list_display = ["name", "labels", "paused"]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:
        return ["name"] if obj else []


@admin.register(Reservation)
class ReservationAdmin(AuditedAdmin):
    autocomplete_fields = ["project", "pool", "host"]
    fields = ["project", "pool", "host", "starts", "ends"]
    list_display = ["project", "pool", "host", "starts", "ends"]

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        """Ignore the URL, because Django fills a time field with its text."""
        return {}


class ProjectForm(ModelForm):  # type: ignore[type-arg]  # Django's forms take no parameters at run time
    """Form that rejects names with jobs."""

    def clean_name(self) -> str:
        name: str = self.cleaned_data["name"]
        if self.instance.pk is None and has_jobs(name):
            raise ValidationError(JOBS_REMAIN)
        return name


@admin.register(Project)
class ProjectAdmin(AuditedAdmin):
    """Projects. The name is read-only, because jobs refer to it."""

    form = ProjectForm
    fields = ["name", "slots", "weight"]
    list_display = ["name", "slots", "weight"]
    search_fields = ["name"]

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        with transaction.atomic():
            if not change:
                delete_project_data(obj.name)
            super().save_model(request, obj, form, change)

    def delete_model(self, request: HttpRequest, obj: Any) -> None:
        """Delete the project with its baselines, webhooks, and email settings."""
        with transaction.atomic():
            delete_project_data(obj.name)
            super().delete_model(request, obj)

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:
        return ["name"] if obj else []

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Forbid deleting `default` and projects with jobs, which a new project of the name would show."""
        stays = obj is not None and (obj.name == DEFAULT_PROJECT or has_jobs(obj.name))
        return not stays and bool(super().has_delete_permission(request, obj))
