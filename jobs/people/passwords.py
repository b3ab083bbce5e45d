"""A new password ends every token of its owner, wherever it was set: on a page, in the admin, by a command.

Sessions end by themselves: Django binds each to the password that it was begun with.
"""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User
from django.db.models.signals import pre_save

from jobs.people.tokens import drop_all


def connect() -> None:
    pre_save.connect(_drop_tokens, sender=User, dispatch_uid="revoke tokens after a password change")


def _drop_tokens(instance: User, raw: bool, update_fields: Any, **_named: Any) -> None:
    if raw or instance._state.adding or (update_fields is not None and "password" not in update_fields):
        return
    before = User.objects.filter(pk=instance.pk).values_list("password", flat=True).first()
    # Django hashes a password anew at a login when its way of hashing changed: it is the same password.
    is_rehash = update_fields == frozenset(["password"]) and getattr(instance, "_password", None) is None
    if before is not None and before != instance.password and not is_rehash:
        drop_all(instance, "the password was changed")
