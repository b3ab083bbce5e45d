"""Synthetic people and projects, far more than in a real installation."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

PROJECTS, MEMBERS, TOKENS, WEBHOOKS, INVITATIONS, VARIABLES = 200, 200, 200, 50, 50, 50
AUDIT = 1000  # entries
LONGEST = 100  # characters of a project's name
WORDS = "synthetic-project.of-a-department-whose-name-goes-on.and-of-its-team"


class Company(NamedTuple):
    """The names of all projects, and of the project with many of everything."""

    project: str
    projects: list[str]


def fill(owner: Any, staff: Any) -> Company:
    """Create people and projects. The owner has two thirds of the projects, and the first has many members."""
    from django.contrib.auth.models import User
    from django.utils import timezone

    from jobs.models import Invitation, JoinToken, Membership, Project, ProjectVariable, Role, Webhook

    projects = Project.objects.bulk_create(
        Project(name=f"{WORDS}-{n:03}".ljust(LONGEST, "x") if n % 4 == 0 else f"synthetic-{n:03}", slots=n * 8 or None)
        for n in range(PROJECTS)
    )
    crowded = projects[0]
    people = User.objects.bulk_create(
        User(username=f"synthetic.person.{n:03}@a-department.example.com", password="!") for n in range(MEMBERS)
    )
    Membership.objects.bulk_create(
        [
            *(
                Membership(project=one, user=owner, role=Role.ADMIN if n % 2 == 0 else Role.OPERATOR)
                for n, one in enumerate(projects)
                if n % 3 != 1
            ),
            *(
                Membership(project=one, user=staff, role=Role.ADMIN if one is crowded else Role.OPERATOR)
                for one in projects[::2]
            ),
            *(Membership(project=crowded, user=one, role=Role.SUBMITTER, added_by="staff") for one in people),
        ]
    )
    until = timezone.now() + timedelta(days=9)
    Invitation.objects.bulk_create(
        Invitation(
            project=crowded, role=Role.SUBMITTER, hash=f"i{n}", note=f"synthetic person {n}", email=f"p{n}@example.com",
            created_by="staff", expires=until,
        )
        for n in range(INVITATIONS)
    )  # fmt: skip
    ProjectVariable.objects.bulk_create(
        ProjectVariable(project=crowded, name=f"SYNTHETIC_{n}", sealed="", changed_by="staff") for n in range(VARIABLES)
    )
    Webhook.objects.bulk_create(
        Webhook(
            project=crowded.name,
            owner=people[n],
            name=f"synthetic hook {n}",
            url=f"https://example.com/{n}/" + "x" * 90,
        )
        for n in range(WEBHOOKS)
    )
    JoinToken.objects.bulk_create(
        JoinToken(hash=f"j{n}", note=f"synthetic rack {n}", created_by="staff", expires=until) for n in range(TOKENS)
    )
    _tokens(staff)
    _audit(crowded.name, [one.username for one in people])
    return Company(crowded.name, [one.name for one in projects])


def _tokens(person: Any) -> None:
    from knox.models import AuthToken

    from jobs.models import Scope, TokenGrant

    made = [AuthToken.objects.create(person)[0] for _ in range(TOKENS)]
    TokenGrant.objects.bulk_create(
        TokenGrant(token=token, name=f"synthetic token {n}", scopes=list(Scope.values)) for n, token in enumerate(made)
    )


def _audit(project: str, people: list[str]) -> None:
    from jobs.models import AuditEntry

    expires = "2027-01-31T10:00:00+00:00"
    token = {"name": "synthetic ci", "scopes": ["jobs:read", "jobs:write", "queue:read"], "expires": expires}
    kinds: list[tuple[str, str, str, Any, Any]] = [
        ("submit", "job", "abcdefghij", None, {"name": "synthetic run", "project": project}),
        ("hold", "job", "abcdefghij", False, True),
        ("priority", "job", "abcdefghij", 0, 5),
        ("make", "token", "3f2a9c1b", None, token),
        ("edit", "project", project, {"slots": 8, "weight": 1.0}, {"slots": 64, "weight": 2.5}),
        ("wish for mail", "user", people[0], {}, {"": ["failed", "lost"], project: ["succeeded"]}),
        ("pause", "queue", "queue", False, True),
        ("revoke all", "token", "the password was changed", ["3f2a9c1b", "77aa01de"], None),
    ]
    AuditEntry.objects.bulk_create(
        AuditEntry(
            who=people[n % len(people)], address="2001:db8::1", what=what, kind=kind, name=name, before=old, after=new
        )
        for n in range(AUDIT)
        for what, kind, name, old, new in [kinds[n % len(kinds)]]
    )
