"""Projects: their quotas and weights."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db import transaction
from django.forms import ModelForm
from django.http import HttpRequest

from jobs.admin.written import Audited
from jobs.models import DEFAULT_PROJECT, Project
from jobs.people.projects import OF_JOBS, forget, has_jobs


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
    search_fields = ["name"]

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        with transaction.atomic():
            if not change:
                forget(obj.name)
            super().save_model(request, obj, form, change)

    def delete_model(self, request: HttpRequest, obj: Any) -> None:
        """Its baselines, webhooks and wishes for mail go with it."""
        with transaction.atomic():
            forget(obj.name)
            super().delete_model(request, obj)

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:
        return ["name"] if obj else []

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Not the one that jobs are of which name none, nor one that has jobs: who made it anew would see them."""
        stays = obj is not None and (obj.name == DEFAULT_PROJECT or has_jobs(obj.name))
        return not stays and bool(super().has_delete_permission(request, obj))
