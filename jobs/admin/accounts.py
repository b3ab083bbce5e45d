"""Admin of accounts, groups, tokens, and sign-ons, with limited rights and audit entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.apps import apps
from django.contrib import admin
from django.contrib.auth.models import Group, User
from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import HttpRequest

from jobs.core.audit import record
from jobs.models.validators import PERSON_NAMES, find_name_problem

RIGHTS = ("is_staff", "is_superuser", "groups", "user_permissions")  # fields of an account


class AccountAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # takes no parameters at run time
    """Mixin of the admin of Django and other packages, which limits rights and records changes.

    Only superusers change rights, create logins, and change or delete accounts of staff. Audit entries name objects
    other than accounts by key, because the name of a token or session may be a credential.
    """

    def has_add_permission(self, request: HttpRequest) -> bool:
        return super().has_add_permission(request) and (_is_superuser(request) or self.model is User)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        may = _is_superuser(request) or (self.model is User and not _belongs_to_staff(obj))
        return may and super().has_change_permission(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        may = _is_superuser(request) or not (_belongs_to_staff(obj) or self.model is Group)
        return may and super().has_delete_permission(request, obj)

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        rights = RIGHTS if self.model is User and not _is_superuser(request) else ()
        return [*super().get_readonly_fields(request, obj), *rights]

    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **options: Any) -> Any:
        """Validate new names of people. Old names that break the rule stay valid."""
        form = super().get_form(request, obj, change=change, **options)
        if self.model is User:
            for name in form.base_fields.keys() & set(PERSON_NAMES):
                form.base_fields[name].validators.append(_make_name_validator(getattr(obj, name, None)))
        return form

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        with transaction.atomic():  # actions on several objects and their audit entries
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


def _is_superuser(request: HttpRequest) -> bool:
    return bool(request.user.is_superuser)


def _belongs_to_staff(obj: Any) -> bool:
    """Return whether this is an account of staff or a login to one."""
    person = obj if isinstance(obj, User) else getattr(obj, "user", None)
    return person is not None and (person.is_staff or person.is_superuser)


def _make_name_validator(older: str | None) -> Callable[[str], None]:
    def check(name: str) -> None:
        if name != older and (words := find_name_problem(name)):
            raise ValidationError(words)

    return check


def register_accounts() -> None:
    for model in apps.get_models():
        if admin.site.is_registered(model) and model._meta.app_label != "jobs":
            own = type(admin.site.get_model_admin(model))
            admin.site.unregister(model)
            admin.site.register(model, type(own.__name__, (AccountAdmin, own), {}))
