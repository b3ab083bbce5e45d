"""The admin: jobs, hosts and queue. Status is shown, never edited; actions go through `jobs.queue.actions`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.apps import apps
from django.contrib import admin, messages
from django.contrib.auth.models import Group, User
from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Field, QuerySet
from django.forms import ModelForm
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from unfold.admin import ModelAdmin, TabularInline
from unfold.decorators import display

from jobs.kinds import layout_words
from jobs.models import (
    DEFAULT_PROJECT,
    Attempt,
    DeadLetter,
    Host,
    Job,
    Member,
    Pool,
    Project,
    Reservation,
    StateChange,
    Status,
)
from jobs.naming import PERSON_NAMES, unfit
from jobs.people.projects import OF_JOBS, has_jobs
from jobs.queue import actions
from jobs.queue.audit import record
from jobs.queue.heard import deadletters
from jobs.queue.hosts import drain
from planner.facts.words import counted

RIGHTS = ("is_staff", "is_superuser", "groups", "user_permissions")  # fields of an account
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


class Deleted(ModelAdmin):
    """What staff delete here is written down."""

    def delete_model(self, request: HttpRequest, obj: Any) -> None:
        with transaction.atomic():
            self._record(request, "delete", obj, self._told(obj), None)
            super().delete_model(request, obj)

    def delete_queryset(self, request: HttpRequest, queryset: Any) -> None:
        for obj in queryset:
            self.delete_model(request, obj)

    def _record(self, request: HttpRequest, what: str, obj: Any, before: Any, after: Any) -> None:
        kind = self.model._meta.model_name
        record(request.user.get_username(), what, kind, obj.pk if kind == "job" else obj, before, after)

    def _told(self, obj: Any) -> dict[str, Any]:
        raise NotImplementedError


class OwnColumn(Deleted):
    """Saves one column and nothing else: the others may have moved on since the form was shown."""

    column: str

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        after = getattr(obj, self.column)
        with transaction.atomic():
            rows = self.model.objects.filter(pk=obj.pk)
            before = rows.values_list(self.column, flat=True).first()
            if before == after:
                return
            rows.update(**{self.column: after})
            self._record(request, self.column, obj, before, after)

    def _told(self, obj: Any) -> dict[str, Any]:
        return {"name": obj.name}


class Audited(Deleted):
    """What staff add and edit here is written down too."""

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        with transaction.atomic():
            before = self._told(self.model.objects.filter(pk=obj.pk).first()) if change else None
            super().save_model(request, obj, form, change)
            self._record(request, "edit" if change else "add", obj, before, self._told(obj))

    def _told(self, obj: Any) -> dict[str, Any]:
        return {name: _plain(getattr(obj, name)) for name in self.fields}


def _plain(value: Any) -> Any:
    """As JSON holds it."""
    return value if value is None or isinstance(value, bool | int | float | str | list) else str(value)


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


@admin.register(Job)
class JobAdmin(OwnColumn):
    """The queue, in the order in which the scheduler takes it, and all that ended."""

    column = "priority"
    list_display = ["name", "id", "owner", "state", "priority", "layout", "wait_reason", "created"]
    list_editable = ["priority"]
    list_filter = ["status", "owner"]
    list_select_related = ["owner"]
    list_max_show_all = list_per_page = 25  # each line holds a form: a hundred take a second to draw
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
        return layout_words(job.spec)

    def formfield_for_dbfield(self, db_field: Field[Any, Any], request: HttpRequest, **kwargs: Any) -> Any:
        """A field of the list has no label that a reader of the screen hears: its column's name is one."""
        field = super().formfield_for_dbfield(db_field, request, **kwargs)
        if field is not None and db_field.name in self.list_editable:
            field.widget.attrs["aria-label"] = db_field.verbose_name
        return field

    def get_queryset(self, request: HttpRequest) -> QuerySet[Job]:
        jobs: QuerySet[Job] = super().get_queryset(request)
        return jobs.defer("estimate", "hardware")  # most of a row, and only the page of one job shows it

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        # A job that holds slots must be cancelled first: deleting its row would orphan its processes.
        return obj is not None and obj.status in ("succeeded", "failed", "lost", "cancelled")

    @admin.action(permissions=["change"], description="Cancel")
    def cancel(self, request: HttpRequest, jobs: QuerySet[Job]) -> None:
        self._each(request, jobs, actions.cancel, "cancelled")

    @admin.action(permissions=["change"], description="Queue again")
    def requeue(self, request: HttpRequest, jobs: QuerySet[Job]) -> None:
        self._each(request, jobs, actions.requeue, "queued again")

    def _each(self, request: HttpRequest, jobs: QuerySet[Job], act: Callable[[Job, str], bool], done: str) -> None:
        names = [job.name for job in jobs if act(job, request.user.get_username())]
        self.message_user(request, f"{len(names)} of {len(jobs)} {done}", messages.SUCCESS)


@admin.register(Host)
class HostAdmin(OwnColumn):
    """Hosts announce themselves; a person may only drain them, or give up one that is silent."""

    column = "drained"

    list_display = ["name", "device_name", "slots", "free", "drained", "last_seen", "dead_letters"]
    readonly_fields = ["name", "slots", "device", "device_name", "memory_bytes", "boot_id", "note", "last_seen"]
    actions = ["drain", "undrain", "give_up"]

    def free(self, host: Host) -> int:
        return host.slots - host.allocations.count()

    @display(description="events not understood")
    def dead_letters(self, host: Host) -> str:
        return deadletters.count_of(host.name)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    @admin.action(permissions=["change"], description="Drain: finish what runs, take nothing new")
    def drain(self, request: HttpRequest, hosts: QuerySet[Host]) -> None:
        self.message_user(request, f"{self._drained(request, hosts, True)} drained", messages.SUCCESS)

    @admin.action(permissions=["change"], description="Take jobs again")
    def undrain(self, request: HttpRequest, hosts: QuerySet[Host]) -> None:
        self.message_user(request, f"{self._drained(request, hosts, False)} take jobs again", messages.SUCCESS)

    def _drained(self, request: HttpRequest, hosts: QuerySet[Host], drained: bool) -> int:
        """How many it was that this changed."""
        return sum(drain(host, drained, request.user.get_username()) for host in hosts)

    @admin.action(description="Give up: it will not come back, its jobs are lost", permissions=["change"])
    def give_up(self, request: HttpRequest, hosts: QuerySet[Host]) -> HttpResponse | None:
        if "confirmed" not in request.POST:
            return self._asked(request, hosts)
        for host in hosts:
            try:
                lost = actions.give_up_host(host, request.user.get_username())
            except actions.HostConnectedError as error:
                self.message_user(request, str(error), messages.ERROR)
            else:
                told = f"{host.name} is given up, and {counted(lost, 'attempt')} with it"
                self.message_user(request, told, messages.SUCCESS)
        return None

    def _asked(self, request: HttpRequest, hosts: QuerySet[Host]) -> HttpResponse:
        members = Member.objects.filter(host__in=hosts, ended__isnull=True).select_related("attempt__job")
        context = {
            **self.admin_site.each_context(request),
            "title": "Give up hosts",
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


class ProjectForm(ModelForm):  # type: ignore[type-arg]  # Django's forms take no parameters at run time
    """Of a name that no job has yet."""

    def clean_name(self) -> str:
        name: str = self.cleaned_data["name"]
        if self.instance.pk is None and has_jobs(name):
            raise ValidationError(OF_JOBS)
        return name


@admin.register(Project)
class ProjectAdmin(Audited):
    """Quotas and weights. Jobs know their project by its name, which therefore stays, and with it the project."""

    form = ProjectForm
    fields = ["name", "slots", "weight"]
    list_display = ["name", "slots", "weight"]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:
        return ["name"] if obj else []

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Not the one that jobs are of which name none, nor one that has jobs: who made it anew would see them."""
        stays = obj is not None and (obj.name == DEFAULT_PROJECT or has_jobs(obj.name))
        return not stays and bool(super().has_delete_permission(request, obj))


@admin.register(Pool)
class PoolAdmin(Audited):
    """Hosts by their labels, under a name that jobs ask for."""

    fields = ["name", "labels", "paused"]
    list_display = ["name", "labels", "paused"]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:
        return ["name"] if obj else []


@admin.register(Reservation)
class ReservationAdmin(Audited):
    """Hosts that are a project's alone for a while."""

    fields = ["project", "pool", "host", "starts", "ends"]
    list_display = ["project", "pool", "host", "starts", "ends"]

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        """Nothing from the address: Django puts words where it then reads a time."""
        return {}


class Others(admin.ModelAdmin):  # type: ignore[type-arg]  # it takes no parameter at run time
    """Mixed into the admin of what is not ours (accounts, groups, tokens, sign-ons): who changed which, and of it what.

    By its key where it is no account: the name of a token or session may be what one gets in with.

    Who is no superuser becomes none by their rights here: they change ordinary people's accounts, and nobody's rights;
    they make nothing that one logs in with, and remove it from ordinary people only.
    """

    def has_add_permission(self, request: HttpRequest) -> bool:
        return super().has_add_permission(request) and (_is_root(request) or self.model is User)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        may = _is_root(request) or (self.model is User and not _of_staff(obj))
        return may and super().has_change_permission(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        may = _is_root(request) or not (_of_staff(obj) or self.model is Group)
        return may and super().has_delete_permission(request, obj)

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        rights = RIGHTS if self.model is User and not _is_root(request) else ()
        return [*super().get_readonly_fields(request, obj), *rights]

    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **given: Any) -> Any:
        """People's names are held to the rule of all names; what stands under an older one is edited all the same."""
        form = super().get_form(request, obj, change=change, **given)
        if self.model is User:
            for name in form.base_fields.keys() & set(PERSON_NAMES):
                form.base_fields[name].validators.append(_fit_unless(getattr(obj, name, None)))
        return form

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        with transaction.atomic():  # what is done to several is done with what is written of it
            return super().changelist_view(request, extra_context)

    def log_addition(self, request: HttpRequest, obj: Any, message: Any) -> Any:
        self._record(request, "add", obj, message)
        return super().log_addition(request, obj, message)

    def log_change(self, request: HttpRequest, obj: Any, message: Any) -> Any:
        self._record(request, "edit", obj, message)
        return super().log_change(request, obj, message)

    def log_deletions(self, request: HttpRequest, queryset: Any) -> Any:
        for obj in queryset:
            self._record(request, "delete", obj, None)
        return super().log_deletions(request, queryset)

    def _record(self, request: HttpRequest, what: str, obj: Any, message: Any) -> None:
        name = obj.get_username() if isinstance(obj, User) else obj.pk
        record(request.user.get_username(), what, self.model._meta.model_name, name, after=message)


def _is_root(request: HttpRequest) -> bool:
    return bool(request.user.is_superuser)


def _of_staff(obj: Any) -> bool:
    """Whether an account is staff's, or what logs in to it."""
    person = obj if isinstance(obj, User) else getattr(obj, "user", None)
    return person is not None and (person.is_staff or person.is_superuser)


def _fit_unless(older: str | None) -> Callable[[str], None]:
    def check(name: str) -> None:
        if name != older and (words := unfit(name)):
            raise ValidationError(f"The name {words}.")

    return check


def _write_down_others() -> None:
    for model in apps.get_models():
        if admin.site.is_registered(model) and model._meta.app_label != "jobs":
            own = type(admin.site.get_model_admin(model))
            admin.site.unregister(model)
            admin.site.register(model, type(own.__name__, (Others, own), {}))


_write_down_others()
