"""One row in every table, with a value in every field, to test backups."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

from allauth.mfa.adapter import get_adapter
from allauth.mfa.models import Authenticator
from allauth.mfa.totp.internal.auth import generate_totp_secret
from django.contrib.auth.models import Permission, User
from django.contrib.contenttypes.models import ContentType
from django.db import models
from django.utils import timezone

from jobs.models import Delivery, Reservation
from jobs.operations import backup

Rows = dict[type[models.Model], Any]

MADE_BY_MIGRATE = (ContentType, Permission)
TEXT = "é☃ x"
# Fields that a row cannot have together with the others.
OMITTED: dict[type[models.Model], set[str]] = {Reservation: {"host"}, Delivery: {"webhook"}}


def fill_tables() -> list[type[models.Model]]:
    """Add a row to every table, and return the models that have none."""
    rows: Rows = {}
    models_in_order = backup._get_models()
    for model in models_in_order:
        _make_row(model, rows)
    _second_factors(rows[User])
    return [model for model in models_in_order if not model._base_manager.exists()]


def _second_factors(user: User) -> None:
    """Create an authenticator app and recovery codes, encrypted as in production."""
    encrypted = get_adapter().encrypt(generate_totp_secret())
    Authenticator.objects.filter(user=user).delete()
    Authenticator.objects.create(user=user, type=Authenticator.Type.TOTP, data={"secret": encrypted})
    seed = {"seed": get_adapter().encrypt("seed"), "used_mask": 5}
    Authenticator.objects.create(user=user, type=Authenticator.Type.RECOVERY_CODES, data=seed)


def _make_row(model: type[models.Model], rows: Rows) -> Any:
    """Return the row of a model, after the rows of its foreign keys.

    A key to its own table points at the row itself.
    """
    if model in MADE_BY_MIGRATE:
        return model._base_manager.first()
    if model not in rows:
        omitted = OMITTED.get(model, set())
        fields = [field for field in model._meta.concrete_fields if field.name not in omitted and _needs_value(field)]
        own = [field for field in fields if field.related_model is model]
        row = model(**{field.name: _make_value(field, rows) for field in fields if field not in own})
        for field in own:
            setattr(row, field.attname, row.pk)
        [rows[model]] = model._base_manager.bulk_create([row])
        for many in model._meta.many_to_many:
            getattr(row, many.name).add(_make_row(many.related_model, rows))  # type: ignore[arg-type]
    return rows[model]


def _needs_value(field: models.Field[Any, Any]) -> bool:
    """Return whether a field needs a value, because neither the database nor the model sets it."""
    return not isinstance(field, models.AutoField) and (not field.primary_key or not field.has_default())


def _make_value(field: models.Field[Any, Any], rows: Rows) -> Any:
    if isinstance(field, models.ForeignKey):
        return _make_row(field.related_model, rows)  # type: ignore[arg-type]
    if field.choices:
        return next(iter(dict(field.flatchoices)))
    for kind, value in VALUES.items():
        if isinstance(field, kind):
            return value(field)
    raise TypeError(f"{field}: no sample value for a {type(field).__name__}")


# Subclasses come before their base classes.
VALUES: dict[type[models.Field[Any, Any]], Callable[[Any], Any]] = {
    models.GenericIPAddressField: lambda _: "192.0.2.1",
    models.EmailField: lambda _: "ann@example.org",
    models.URLField: lambda _: "https://example.org/",
    models.CharField: lambda field: TEXT[: field.max_length],
    models.TextField: lambda _: TEXT,
    models.BooleanField: lambda _: True,
    models.IntegerField: lambda _: 1,
    models.FloatField: lambda _: 0.1,
    models.DateTimeField: lambda _: timezone.now() + datetime.timedelta(days=1, microseconds=1),
    models.JSONField: lambda _: {"a": [1, 0.5, TEXT, None]},
}
