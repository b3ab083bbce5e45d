"""The pages of projects: members, invitations, quota, and what their jobs are handed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.db.models import Count
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_GET, require_POST

from contracts.security import VARIABLE_NAME_PREFIXES
from jobs.core.access import find_project, find_project_to_administer, may_administer, visible_projects
from jobs.core.pagination import listed, page_of
from jobs.core.text import storable, whole_number
from jobs.models import DEFAULT_PROJECT, Project, Role
from jobs.pages.account import refusal
from jobs.people import invitations, projects, variables
from jobs.people.invitation_mail import get_invitation_url, mail
from jobs.planning.queries import checked
from planner.facts.validation import SpecError


@require_GET
@login_required
def index(request: HttpRequest) -> HttpResponse:
    """Those that one may submit to or look into."""
    counted = visible_projects(request.user).annotate(members=Count("memberships"))
    found = listed(request, counted.order_by("name"), "name")
    shown = list(found.page)
    rows = [
        {"project": project, "told": told}
        for project, told in zip(shown, projects.all_told(shown, request.user), strict=True)
    ]
    return render(request, "people/projects.html", {"rows": rows, "listed": found})


@require_GET
@login_required
def project(request: HttpRequest, name: str) -> HttpResponse:
    found = find_project(request.user, name)
    administers = may_administer(request.user, found.name)
    members = listed(request, found.memberships.select_related("user"), "user__username")
    context: dict[str, Any] = {
        "project": found,
        "told": projects.told(found, request.user),
        "listed": members,
        "members": [projects.member_told(one) for one in members.page],
        "administers": administers,
        "is_default": found.name == DEFAULT_PROJECT,
        "roles": [role.label for role in Role],
    }
    if administers:
        context |= {
            "open": (opened := page_of(request, invitations.still_open(found), "invitations")),
            "invitations": [invitations.told(one) for one in opened],
            "variables": variables.known(found),
            "prefixes": VARIABLE_NAME_PREFIXES,
        }
    return render(request, "people/project.html", context)


def _changing(change: Callable[[HttpRequest, Project], HttpResponse | None]) -> Callable[..., HttpResponse]:
    """A POST by an admin of the project, then back to its page, with what was wrong in words."""

    @sensitive_post_parameters("value")
    @require_POST
    @login_required
    def answered(request: HttpRequest, name: str) -> HttpResponse:
        found = find_project_to_administer(request.user, name)
        try:
            answer = change(request, found)
        except SpecError as error:
            messages.error(request, refusal(error))
            answer = None
        return answer or redirect("project", found.name)

    return answered


@_changing
def keep_to(request: HttpRequest, found: Project) -> None:
    text = request.POST.get("own_slots", "").strip()
    number = whole_number(text, 0, projects.MOST_SLOTS)
    asked = checked(projects.ProjectChange, {"own_slots": (text if number is None else number) if text else None})
    projects.keep_to(found, asked.own_slots, _by(request).get_username())


@_changing
def set_role(request: HttpRequest, found: Project) -> None:
    asked = checked(projects.RoleWish, {"role": request.POST.get("role", "")})
    if storable(user := request.POST.get("user", "").strip()):
        projects.set_role(found, user, Role[asked.role.upper()], _by(request))


@_changing
def remove_member(request: HttpRequest, found: Project) -> None:
    user = request.POST.get("user", "")
    if storable(user) and projects.remove_member(found, user, _by(request)):
        messages.success(request, f"User {user} was removed from project {found.name}.")


@_changing
def invite(request: HttpRequest, found: Project) -> HttpResponse:
    """The only page that shows the link."""
    days = request.POST.get("days", "")
    number = whole_number(days, 0, 10**6)
    wish: dict[str, Any] = {"role": request.POST.get("role", ""), "note": request.POST.get("note", "").strip()}
    wish["email"] = request.POST.get("email", "").strip() or None
    asked = checked(invitations.InvitationWish, {**wish, "days": days if number is None else number})
    made, text = invitations.invite(found, asked, _by(request).get_username())
    context = {
        "project": found,
        "invitation": made,
        "link": get_invitation_url(request, text),
        "mailed": mail(made, text),
    }
    answer = render(request, "people/invited.html", context)
    answer["Cache-Control"] = "no-store"
    return answer


@_changing
def revoke_invitation(request: HttpRequest, found: Project) -> None:
    number = whole_number(request.POST.get("id", ""), 1, 2**63 - 1)
    if number is not None and invitations.revoke(found, number, _by(request).get_username()):
        messages.success(request, "The invitation was revoked.")


@_changing
def set_variable(request: HttpRequest, found: Project) -> None:
    asked = checked(variables.VariableWish, {"value": request.POST.get("value", "")})
    name = request.POST.get("name", "").strip()
    variables.put(found, name, asked.value, _by(request).get_username())
    messages.success(request, f"New jobs of project {found.name} get the environment variable {name}.")


@_changing
def remove_variable(request: HttpRequest, found: Project) -> None:
    name = request.POST.get("name", "")
    if storable(name) and variables.remove(found, name, _by(request).get_username()):
        messages.success(request, f"The environment variable {name} was removed.")


def _by(request: HttpRequest) -> User:
    return cast(User, request.user)
