"""Ways in which the admin saves and deletes, each of which is written down."""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.http import HttpRequest
from unfold.admin import ModelAdmin

from jobs.core.audit import record


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
