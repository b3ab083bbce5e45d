"""Members of projects, invitations, scopes of API tokens, and variables of projects."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import models

from jobs.models.policy import DEFAULT_PROJECT, Project


class Role(models.IntegerChoices):
    """Role of a project member. Each role includes the rights of the roles before it."""

    VIEWER = 10, "viewer"
    SUBMITTER = 20, "submitter"
    OPERATOR = 30, "operator"
    ADMIN = 40, "admin"


class Scope(models.TextChoices):
    """Scope of an API token, which limits the rights of its owner."""

    READ = "read"
    SUBMIT = "submit"
    OPERATE = "operate"


def check_scopes(scopes: Any) -> None:
    """Raise ValidationError unless `scopes` is a list of distinct scopes."""
    if not isinstance(scopes, list) or not scopes or len(set(scopes)) != len(scopes):
        raise ValidationError("Use one or more of `read`, `submit`, and `operate`, each at most once.")
    if unknown := [scope for scope in scopes if scope not in Scope.values]:
        raise ValidationError(f"The scope {unknown[0]!r} is unknown. Use {', '.join(Scope.values)}.")


class Membership(models.Model):
    """Role of a user in a project. `jobs.core.access` reads it."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="memberships")
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="memberships")
    role = models.PositiveSmallIntegerField(choices=Role)
    added = models.DateTimeField(auto_now_add=True)
    added_by = models.CharField(max_length=150, editable=False)

    class Meta:
        ordering = ["user__username"]
        constraints = [models.UniqueConstraint(fields=["project", "user"], name="one_role_per_member")]

    def __str__(self) -> str:
        return f"{self.user} {self.get_role_display()} of {self.project}"


def get_project_names(user: Any, least: Role = Role.VIEWER) -> list[str]:
    """Return the names of the projects in which the user has at least a role.

    The project `default` has no members. Names let the database use the indexes of jobs, unlike a subquery.
    """
    mine = Membership.objects.filter(user=user, role__gte=least).exclude(project__name=DEFAULT_PROJECT)
    return list(mine.order_by("project__name").values_list("project__name", flat=True))


class Invitation(models.Model):
    """Single-use link that makes its recipient a member of a project. Only its hash is stored."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="invitations")
    role = models.PositiveSmallIntegerField(choices=Role)
    hash = models.CharField(max_length=64, unique=True, editable=False, help_text="SHA-256")
    note = models.CharField(max_length=200, blank=True, default="", help_text="note about the invited person")
    email = models.EmailField(
        blank=True,
        default="",
        db_default="",
        help_text="mail address of the only account that can accept the invitation",
    )
    created = models.DateTimeField(auto_now_add=True)
    created_by = models.CharField(max_length=150, editable=False)
    expires = models.DateTimeField()
    accepted = models.DateTimeField(null=True, editable=False)
    accepted_by = models.CharField(max_length=150, blank=True, default="", editable=False)
    revoked = models.DateTimeField(null=True, editable=False)

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"invitation {self.pk} to {self.project}"


class TokenGrant(models.Model):
    """Name and scopes of an API token, whose hash knox stores.

    A token without a grant has all rights of its owner. Old tokens and tokens from commands have no grant.
    """

    token = models.OneToOneField("knox.AuthToken", on_delete=models.CASCADE, related_name="grant")
    name = models.CharField(max_length=100)
    scopes = models.JSONField(validators=[check_scopes], help_text='["read", "submit"]')
    last_used = models.DateTimeField(null=True, editable=False)
    address = models.CharField(max_length=45, blank=True, default="", editable=False, help_text="used last from where")

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return self.name


class ProjectVariable(models.Model):
    """Environment variable of the jobs of a project. `jobs.people.variables` encrypts its value."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="variables")
    name = models.CharField(max_length=100)
    sealed = models.TextField(editable=False, help_text="its value, encrypted")
    changed = models.DateTimeField(auto_now=True)
    changed_by = models.CharField(max_length=150, editable=False)

    class Meta:
        ordering = ["name"]
        constraints = [models.UniqueConstraint(fields=["project", "name"], name="one_value_per_variable")]

    def __str__(self) -> str:
        return f"{self.name} of {self.project}"
