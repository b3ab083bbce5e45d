"""Base classes of the admin that record changes in the audit log, and a filter by owner."""

from __future__ import annotations

from typing import Any

from django.contrib.admin.widgets import AutocompleteSelect
from django.db import transaction
from django.http import HttpRequest
from unfold.admin import ModelAdmin
from unfold.contrib.filters.admin import AutocompleteSelectFilter
from unfold.contrib.filters.forms import AutocompleteDropdownForm

from jobs.core.audit import record


class AuditedDelete(ModelAdmin):
    """Admin that records deletions."""

    def delete_model(self, request: HttpRequest, obj: Any) -> None:
        with transaction.atomic():
            self._record(request, "delete", obj, self._get_facts(obj), None)
            super().delete_model(request, obj)

    def delete_queryset(self, request: HttpRequest, queryset: Any) -> None:
        for obj in queryset:
            self.delete_model(request, obj)

    def _record(self, request: HttpRequest, what: str, obj: Any, before: Any, after: Any) -> None:
        kind = self.model._meta.model_name
        record(request.user.get_username(), what, kind, obj.pk if kind == "job" else obj, before, after)

    def _get_facts(self, obj: Any) -> dict[str, Any]:
        raise NotImplementedError


class SingleColumnAdmin(AuditedDelete):
    """Admin that saves only one column, because others may have changed since the form was shown."""

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

    def _get_facts(self, obj: Any) -> dict[str, Any]:
        return {"name": obj.name}


class AuditedAdmin(AuditedDelete):
    """Admin that records all changes."""

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        with transaction.atomic():
            before = self._get_facts(self.model.objects.filter(pk=obj.pk).first()) if change else None
            super().save_model(request, obj, form, change)
            self._record(request, "edit" if change else "add", obj, before, self._get_facts(obj))

    def _get_facts(self, obj: Any) -> dict[str, Any]:
        return {name: _to_json(getattr(obj, name)) for name in self.fields}


def _to_json(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str | list) else str(value)


class OwnerSelect(AutocompleteSelect):
    """Select of an owner with a placeholder, which is its name for screen readers."""

    def build_attrs(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**super().build_attrs(*args, **kwargs), "data-placeholder": "Any owner"}


class OwnerForm(AutocompleteDropdownForm):
    widget = OwnerSelect


class OwnerFilter(AutocompleteSelectFilter):
    form_class = OwnerForm
