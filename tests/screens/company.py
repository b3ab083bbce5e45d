"""People, projects and what belongs to them, more than anybody has: synthetic, made up here and named so."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

PROJECTS, MEMBERS, TOKENS, WEBHOOKS, INVITATIONS, VARIABLES = 200, 200, 200, 50, 50, 50
LONGEST = 100  # characters of a project's name
WORDS = "synthetic-project.of-a-department-whose-name-goes-on.and-of-its-team"


class Company(NamedTuple):
    """The names of all projects, and the one of these that has many of everything."""

    project: str
    projects: list[str]


def fill(owner: Any, staff: Any) -> Company:
    """Two thirds of the projects are the owner's; the first has the crowd."""
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
    return Company(crowded.name, [one.name for one in projects])


def _tokens(person: Any) -> None:
    from knox.models import AuthToken

    from jobs.models import Scope, TokenGrant

    made = [AuthToken.objects.create(person)[0] for _ in range(TOKENS)]
    TokenGrant.objects.bulk_create(
        TokenGrant(token=token, name=f"synthetic token {n}", scopes=list(Scope.values)) for n, token in enumerate(made)
    )
