"""Hosts, what they say that is not understood, and how they are shared out."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from unfold.admin import ModelAdmin
from unfold.decorators import display

from jobs.admin.written import Audited, OwnColumn
from jobs.models import DeadLetter, Host, Member, Pool, Reservation
from jobs.queue import actions
from jobs.queue.inbound import event_handlers
from jobs.queue.scheduling.snapshot import count_free_slots
from jobs.queue.staff_actions import set_drained
from planner.facts.validation import format_count


@admin.register(Host)
class HostAdmin(OwnColumn):
    """Hosts announce themselves; a person may only drain them, or give up one that is silent."""

    column = "drained"

    list_display = ["name", "device_name", "slots", "free", "drained", "last_seen", "dead_letters"]
    readonly_fields = ["name", "slots", "device", "device_name", "memory_bytes", "boot_id", "note", "last_seen"]
    actions = ["drain", "undrain", "give_up"]

    search_fields = ["name"]
    list_filter = ["drained", "device"]

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        """Its lines know what was not understood of each: asked for at once."""
        found = super().get_changelist_instance(request)
        hosts = list(found.result_list)
        counts, free = event_handlers.count_dead_letters(host.name for host in hosts), count_free_slots()
        for host in hosts:
            host.free_slots = free.get(host.pk, 0)
            host.not_understood = counts[host.name]
        found.result_list = hosts
        return found

    @display
    def free(self, host: Any) -> str:
        return str(host.free_slots)

    @display(description="events that failed")
    def dead_letters(self, host: Any) -> str:
        return str(host.not_understood)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    @admin.action(permissions=["change"], description="Drain hosts")
    def drain(self, request: HttpRequest, hosts: QuerySet[Host]) -> None:
        self.message_user(request, f"{self._drained(request, hosts, True)} drained", messages.SUCCESS)

    @admin.action(permissions=["change"], description="Undrain hosts")
    def undrain(self, request: HttpRequest, hosts: QuerySet[Host]) -> None:
        self.message_user(request, f"{self._drained(request, hosts, False)} undrained", messages.SUCCESS)

    def _drained(self, request: HttpRequest, hosts: QuerySet[Host], drained: bool) -> int:
        """How many it was that this changed."""
        return sum(set_drained(host, drained, request.user.get_username()) for host in hosts)

    @admin.action(description="Mark hosts and their jobs as lost", permissions=["change"])
    def give_up(self, request: HttpRequest, hosts: QuerySet[Host]) -> HttpResponse | None:
        if "confirmed" not in request.POST:
            return self._asked(request, hosts)
        for host in hosts:
            try:
                lost = actions.mark_host_lost(host, request.user.get_username())
            except actions.HostConnectedError as error:
                self.message_user(request, str(error), messages.ERROR)
            else:
                told = f"Marked host {host.name} and {format_count(lost, 'attempt')} as lost"
                self.message_user(request, told, messages.SUCCESS)
        return None

    def _asked(self, request: HttpRequest, hosts: QuerySet[Host]) -> HttpResponse:
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
    """What could not be taken in: from whom, and why."""

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
class PoolAdmin(Audited):
    """Hosts by their labels, under a name that jobs ask for."""

    search_fields = ["name"]  # which the form of a reservation asks for
    fields = ["name", "labels", "paused"]
    list_display = ["name", "labels", "paused"]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:
        return ["name"] if obj else []


@admin.register(Reservation)
class ReservationAdmin(Audited):
    """Hosts that are a project's alone for a while."""

    autocomplete_fields = ["project", "pool", "host"]
    fields = ["project", "pool", "host", "starts", "ends"]
    list_display = ["project", "pool", "host", "starts", "ends"]

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        """Nothing from the address: Django puts words where it then reads a time."""
        return {}
