"""A row of every table that there is, with a value in every field: what a backup has to bring back."""

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

Made = dict[type[models.Model], Any]

MADE_BY_MIGRATE = (ContentType, Permission)
TEXT = "é☃ x"
# Where a row may not have all of its fields at once.
LEFT_OUT: dict[type[models.Model], set[str]] = {Reservation: {"host"}, Delivery: {"webhook"}}


def fill() -> list[type[models.Model]]:
    """Puts a row into every table; returns the models that have none."""
    made: Made = {}
    every = backup._get_models()
    for model in every:
        _row(model, made)
    _second_factors(made[User])
    return [model for model in every if not model._base_manager.exists()]


def _second_factors(user: User) -> None:
    """An authenticator app and recovery codes, sealed as the product keeps them."""
    sealed = get_adapter().encrypt(generate_totp_secret())
    Authenticator.objects.filter(user=user).delete()
    Authenticator.objects.create(user=user, type=Authenticator.Type.TOTP, data={"secret": sealed})
    seed = {"seed": get_adapter().encrypt("seed"), "used_mask": 5}
    Authenticator.objects.create(user=user, type=Authenticator.Type.RECOVERY_CODES, data=seed)


def _row(model: type[models.Model], made: Made) -> Any:
    """The model's one row, behind those that it points at; itself where it may point at one of its kind."""
    if model in MADE_BY_MIGRATE:
        return model._base_manager.first()
    if model not in made:
        left_out = LEFT_OUT.get(model, set())
        fields = [field for field in model._meta.concrete_fields if field.name not in left_out and _is_asked(field)]
        own = [field for field in fields if field.related_model is model]
        row = model(**{field.name: _value(field, made) for field in fields if field not in own})
        for field in own:
            setattr(row, field.attname, row.pk)
        [made[model]] = model._base_manager.bulk_create([row])
        for many in model._meta.many_to_many:
            getattr(row, many.name).add(_row(many.related_model, made))  # type: ignore[arg-type]
    return made[model]


def _is_asked(field: models.Field[Any, Any]) -> bool:
    """Whether neither the database nor the model names the row by itself."""
    return not isinstance(field, models.AutoField) and (not field.primary_key or not field.has_default())


def _value(field: models.Field[Any, Any], made: Made) -> Any:
    if isinstance(field, models.ForeignKey):
        return _row(field.related_model, made)  # type: ignore[arg-type]
    if field.choices:
        return next(iter(dict(field.flatchoices)))
    for kind, value in VALUES.items():
        if isinstance(field, kind):
            return value(field)
    raise TypeError(f"{field}: no value is known for a {type(field).__name__}")


# In the order of asking: the special before the general.
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
