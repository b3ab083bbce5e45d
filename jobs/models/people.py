"""Who works in which project, who is invited, what a token may do, and what jobs of a project are handed."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import models

from jobs.models.policy import DEFAULT_PROJECT, Project


class Role(models.IntegerChoices):
    """What a member may do in a project; each may all that those before it may."""

    VIEWER = 10, "viewer"
    SUBMITTER = 20, "submitter"
    OPERATOR = 30, "operator"
    ADMIN = 40, "admin"


class Scope(models.TextChoices):
    """What a token may be used for, of what its owner may do."""

    READ = "read"
    SUBMIT = "submit"
    OPERATE = "operate"


def checked_scopes(scopes: Any) -> None:
    """Some of `Scope`, each once.

    Raises:
        ValidationError: it is nothing of the kind.
    """
    if not isinstance(scopes, list) or not scopes or len(set(scopes)) != len(scopes):
        raise ValidationError("Use one or more of `read`, `submit`, and `operate`, each at most once.")
    if unknown := [scope for scope in scopes if scope not in Scope.values]:
        raise ValidationError(f"The scope {unknown[0]!r} is unknown. Use {', '.join(Scope.values)}.")


class Membership(models.Model):
    """A person's role in a project. `jobs.core.access` is what reads it."""

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


def projects_of(user: Any, least: Role = Role.VIEWER) -> list[str]:
    """Names of the projects in which the user has a role, or at least one that may so much. Nobody is a member of
    `default`, in which each has their own jobs alone.

    Names and not a subquery: with them a database finds a user's jobs by its indexes, and does not read them all.
    """
    mine = Membership.objects.filter(user=user, role__gte=least).exclude(project__name=DEFAULT_PROJECT)
    return list(mine.order_by("project__name").values_list("project__name", flat=True))


class Invitation(models.Model):
    """A link that makes whoever follows it a member, once, and an account for who has none. Only its hash is kept."""

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
    """What is known of a REST token beside its hash, which knox keeps. One without this may all that its owner may:
    it was made before there were scopes, or by a command on the board's own machine.
    """

    token = models.OneToOneField("knox.AuthToken", on_delete=models.CASCADE, related_name="grant")
    name = models.CharField(max_length=100)
    scopes = models.JSONField(validators=[checked_scopes], help_text='["read", "submit"]')
    last_used = models.DateTimeField(null=True, editable=False)
    address = models.CharField(max_length=45, blank=True, default="", editable=False, help_text="used last from where")

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return self.name


class ProjectVariable(models.Model):
    """A variable in the environment of a project's jobs. Its value is written, never read back: see
    `jobs.people.variables`.
    """

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
