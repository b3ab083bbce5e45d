"""The pages of projects: members, quota and variables, and the page that an invitation link opens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.contrib.auth import login
from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.models import User
from django.db.models import Count
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.http import urlencode
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from contracts.security import VARIABLE_NAME_PREFIXES
from jobs.core.access import find_project, find_project_to_administer, get_visible_projects, may_administer
from jobs.core.filters import get_list_page, get_page
from jobs.core.text import is_storable, parse_whole_number
from jobs.models import DEFAULT_PROJECT, Invitation, Project, Role
from jobs.pages.view_helpers import get_user, get_username, join_sentences, render_secret
from jobs.people import invitations, projects, variables
from jobs.people.invitations import get_invitation_path, get_invitation_url, mail_invitation
from jobs.planning.schemas import validate_request
from planner.facts.validation import SpecError

PASSWORD_BACKEND = "django.contrib.auth.backends.ModelBackend"  # noqa: S105 - the name of a class


@require_GET
def index(request: HttpRequest) -> HttpResponse:
    """List the projects that the user can see."""
    counted = get_visible_projects(request.user).annotate(members=Count("memberships"))
    found = get_list_page(request, counted.order_by("name"), "name")
    shown = list(found.page)
    details = projects.serialize_projects(shown, request.user)
    rows = [{"project": project, "details": one} for project, one in zip(shown, details, strict=True)]
    return render(request, "people/projects.html", {"rows": rows, "listed": found})


@require_GET
def project(request: HttpRequest, name: str) -> HttpResponse:
    """Show a project, with its invitations and variables for an admin."""
    found = find_project(request.user, name)
    administers = may_administer(request.user, found.name)
    members = get_list_page(request, found.memberships.select_related("user"), "user__username")
    context: dict[str, Any] = {
        "project": found,
        "details": projects.serialize_project(found, request.user),
        "listed": members,
        "members": [projects.serialize_member(one) for one in members.page],
        "administers": administers,
        "is_default": found.name == DEFAULT_PROJECT,
        "roles": [role.label for role in Role],
    }
    if administers:
        context |= {
            "open": (opened := get_page(request, invitations.get_open_invitations(found), "invitations")),
            "invitations": [invitations.serialize_invitation(one) for one in opened],
            "variables": variables.serialize_variables(found),
            "prefixes": VARIABLE_NAME_PREFIXES,
        }
    return render(request, "people/project.html", context)


def admin_action(change: Callable[[HttpRequest, Project], HttpResponse | None]) -> Callable[..., HttpResponse]:
    """Decorate a POST by an admin of the project. The view redirects to the project and shows errors there."""

    @sensitive_post_parameters("value")
    @require_POST
    def respond(request: HttpRequest, name: str) -> HttpResponse:
        found = find_project_to_administer(request.user, name)
        try:
            response = change(request, found)
        except SpecError as error:
            messages.error(request, join_sentences(error))
            response = None
        return response or redirect("project", found.name)

    return respond


@admin_action
def set_quota(request: HttpRequest, found: Project) -> None:
    text = request.POST.get("own_slots", "").strip()
    number = parse_whole_number(text, 0, projects.MAX_SLOTS)
    wish = validate_request(
        projects.ProjectChange, {"own_slots": (text if number is None else number) if text else None}
    )
    projects.set_own_slots(found, wish.own_slots, get_username(request))


@admin_action
def set_role(request: HttpRequest, found: Project) -> None:
    wish = validate_request(projects.RoleRequest, {"role": request.POST.get("role", "")})
    if is_storable(user := request.POST.get("user", "").strip()):
        projects.set_role(found, user, Role[wish.role.upper()], get_user(request))


@admin_action
def remove_member(request: HttpRequest, found: Project) -> None:
    user = request.POST.get("user", "")
    if is_storable(user) and projects.remove_member(found, user, get_user(request)):
        messages.success(request, f"User {user} was removed from project {found.name}.")


@admin_action
def invite(request: HttpRequest, found: Project) -> HttpResponse:
    """Create an invitation and show its link once."""
    days = request.POST.get("days", "")
    number = parse_whole_number(days, 0, 10**6)
    data: dict[str, Any] = {
        "role": request.POST.get("role", ""),
        "note": request.POST.get("note", "").strip(),
        "email": request.POST.get("email", "").strip() or None,
        "days": days if number is None else number,
    }
    made, text = invitations.create_invitation(
        found, validate_request(invitations.InvitationRequest, data), get_username(request)
    )
    context = {
        "project": found,
        "invitation": made,
        "link": get_invitation_url(request, text),
        "mailed": mail_invitation(made, text),
    }
    return render_secret(request, "people/invited.html", context)


@admin_action
def revoke_invitation(request: HttpRequest, found: Project) -> None:
    number = parse_whole_number(request.POST.get("id", ""), 1, 2**63 - 1)
    if number is not None and invitations.revoke_invitation(found, number, get_username(request)):
        messages.success(request, "The invitation was revoked.")


@admin_action
def set_variable(request: HttpRequest, found: Project) -> None:
    wish = validate_request(variables.VariableRequest, {"value": request.POST.get("value", "")})
    name = request.POST.get("name", "").strip()
    variables.set_variable(found, name, wish.value, get_username(request))
    messages.success(request, f"New jobs of project {found.name} get the environment variable {name}.")


@admin_action
def remove_variable(request: HttpRequest, found: Project) -> None:
    name = request.POST.get("name", "")
    if is_storable(name) and variables.remove_variable(found, name, get_username(request)):
        messages.success(request, f"The environment variable {name} was removed.")


@sensitive_post_parameters("password1", "password2")
@login_not_required
@require_http_methods(["GET", "POST"])
@never_cache
def invitation(request: HttpRequest) -> HttpResponse:
    """Show an invitation. A POST accepts the invitation, after login or with a new account."""
    text = request.GET.get("token", "")
    try:
        found = invitations.find_invitation(text)
        user = request.user
        if isinstance(user, User):
            response = _accept_invitation(request, user, found, text)
        else:
            response = _create_account(request, found, text)
    except invitations.NotInvitedError as error:
        response = render(request, "people/invitation.html", {"problem": str(error)}, status=404)
    # With `no-referrer`, forms of the page have the origin `null`, which the CSRF check refuses.
    response["Referrer-Policy"] = "strict-origin"
    return response


def _accept_invitation(request: HttpRequest, user: User, found: Invitation, text: str) -> HttpResponse:
    invitations.check_recipient(found, user)
    if request.method != "POST":
        return render(request, "people/invitation.html", {"invitation": found})
    made = invitations.accept_invitation(user, text)
    messages.success(request, f"You joined project {made.project.name} with the role {made.get_role_display()}.")
    return redirect("project", made.project.name)


def _create_account(request: HttpRequest, found: Invitation, text: str) -> HttpResponse:
    login_url = f"{reverse('login')}?{urlencode({'next': get_invitation_path(text)})}"
    if not settings.INVITED_PEOPLE:
        return render(request, "people/invitation.html", {"invitation": found, "login_url": login_url})
    form: Any = invitations.AccountForm(found, *([request.POST] if request.method == "POST" else []))
    user = invitations.create_account(form, found) if form.is_valid() else None
    if user is None:
        context = {"invitation": found, "form": form, "login_url": login_url}
        return render(request, "people/invitation.html", context, status=422 if form.is_bound else 200)
    login(request, user, backend=PASSWORD_BACKEND)
    messages.success(
        request,
        f"Your account is ready. You joined project {found.project.name} with the role {found.get_role_display()}.",
    )
    return redirect("project", found.project.name)
