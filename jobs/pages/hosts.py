"""The pages of hosts and their calibration, and the actions of staff on hosts and join tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_GET, require_POST

from jobs.core.access import get_visible_jobs, may_change_hosts
from jobs.core.filters import get_page
from jobs.core.text import is_storable, parse_whole_number
from jobs.models import LIVE, Host, JoinToken
from jobs.pages.view_helpers import get_user, get_username, join_sentences, render_secret
from jobs.planning.schemas import validate_request
from jobs.queue import actions
from jobs.queue import staff_actions as staff
from jobs.queue.hosts import joining
from jobs.queue.hosts.checks import list_host_versions
from jobs.queue.hosts.presentation import (
    CONTACT_STATE_TONES,
    CONTACT_STATES,
    SlotCell,
    build_grid,
    get_contact_state,
    may_see_host_internals,
    paginate_hosts,
)
from jobs.queue.scheduling.snapshot import count_free_slots
from planner.facts.validation import SpecError


def staff_action(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """Decorate a POST by staff with the right to change hosts."""

    @require_POST
    @wraps(view)
    def check_user(request: HttpRequest, **kwargs: str) -> HttpResponse:
        if not may_change_hosts(request.user):
            raise PermissionDenied
        return view(request, **kwargs)

    return check_user


@require_GET
def hosts(request: HttpRequest) -> HttpResponse:
    """Show a page of the hosts with their slots. `q` filters by name, `state` by state.

    `?part=grid` returns the part that refreshes.
    """
    filters = {name: request.GET.get(name, "").strip() for name in ("q", "state")}
    found = paginate_hosts(
        filters["q"], filters["state"] if filters["state"] in CONTACT_STATES else "", request.GET.get("page")
    )
    free = count_free_slots()
    context: dict[str, Any] = {
        "grid": build_grid(found.hosts, request.user, free),
        "free": sum(free.values()),
        "tones": CONTACT_STATE_TONES,
        "listed": found,
        "filters": filters,
    }
    if request.GET.get("part") == "grid":
        return render(request, "hosts/grid.html", context)
    if may_change_hosts(request.user):
        page = get_page(request, joining.list_recent_tokens(), "tokens")
        context |= {
            "may_change": True,
            "token_page": page,
            "tokens": [{"token": token, "problem": joining.explain_invalid_token(token)} for token in page],
            "board": _get_board_url(request),
        }
    return render(request, "hosts/list.html", context)


@require_GET
def host(request: HttpRequest, name: str) -> HttpResponse:
    """Show a host and its calibration. `?part=live` returns the part that refreshes."""
    found = _find(name)
    shown, state = build_grid([found], request.user, count_free_slots()), get_contact_state(found)
    context: dict[str, Any] = {
        "host": found,
        "shown": shown,
        "slots": _list_slots(found, shown.hosts[0].slots, found.use if shown.hosts[0].gauges else None),
        "state": state,
        "tone": CONTACT_STATE_TONES[state],
        "gauges": shown.hosts[0].gauges,
        "sees_inside": may_see_host_internals(request.user),
    }
    if request.GET.get("part") == "live":
        return render(request, "hosts/live.html", context)
    context |= {
        "profile": found.profile,
        "gemm": _format_gemm(found.profile) if found.profile else [],
        "running": get_visible_jobs(request.user)
        .filter(status__in=LIVE, kind="calibrate", wanted_host=found.name)
        .order_by("created")
        .first(),
        "versions": list_host_versions(found.facts),
        "may_change": may_change_hosts(request.user),
        "live_members": found.members.filter(ended=None).count(),
    }
    return render(request, "hosts/detail.html", context)


@staff_action
def calibrate(request: HttpRequest, name: str) -> HttpResponse:
    """Queue a calibration and open its job."""
    try:
        job = actions.submit_calibration(get_user(request), _find(name))
    except actions.CalibrationError as error:
        messages.error(request, str(error))
        return redirect("host", name)
    return redirect("job-detail", job.id)


@staff_action
def drain(request: HttpRequest, name: str) -> HttpResponse:
    if staff.set_drained(_find(name), True, get_username(request)):
        messages.success(request, f"Host {name} is drained. Running jobs continue.")
    return redirect("host", name)


@staff_action
def undrain(request: HttpRequest, name: str) -> HttpResponse:
    if staff.set_drained(_find(name), False, get_username(request)):
        messages.success(request, f"Host {name} is undrained.")
    return redirect("host", name)


@staff_action
def mark_lost(request: HttpRequest, name: str) -> HttpResponse:
    """Mark the host and its attempts as lost, which frees its slots."""
    try:
        lost = actions.mark_host_lost(_find(name), get_username(request))
    except actions.HostConnectedError:
        messages.error(request, f"Host {name} has contact again. Cancel the jobs on the host instead.")
        return redirect("host", name)
    messages.success(request, f"Marked host {name} and {lost} attempt{'' if lost == 1 else 's'} as lost.")
    return redirect("host", name)


@staff_action
def remove(request: HttpRequest, name: str) -> HttpResponse:
    """Remove the host, its key and its Redis user."""
    try:
        staff.remove_host(_find(name), get_username(request))
    except staff.BusyHostError as error:
        messages.error(request, str(error))
        return redirect("host", name)
    messages.success(request, f"Removed host {name}, and the key and Redis user of the host.")
    return redirect("hosts")


@staff_action
def make_token(request: HttpRequest) -> HttpResponse:
    """Create a join token and show it once."""
    form = request.POST
    data: dict[str, Any] = {"note": form.get("note", "").strip(), "labels": form.get("labels", "").split()}
    for name in ("hours", "uses"):
        if text := form.get(name, ""):
            number = parse_whole_number(text, 0, 10**6)
            data[name] = text if number is None else number
    try:
        query = validate_request(joining.JoinTokenRequest, data)
    except SpecError as error:
        messages.error(request, join_sentences(error))
        return redirect("hosts")
    token, secret = staff.create_token(get_username(request), query)
    context = {"token": token, "text": secret, "board": _get_board_url(request)}
    return render_secret(request, "hosts/token.html", context)


@staff_action
def revoke_token(request: HttpRequest, key: str) -> HttpResponse:
    number = parse_whole_number(key, 1, 2**63 - 1)
    if staff.revoke_token(get_object_or_404(JoinToken, pk=number or 0), get_username(request)):
        messages.success(request, "The join token is revoked. Hosts that joined with the token stay on the board.")
    return redirect("hosts")


def _find(name: str) -> Host:
    return get_object_or_404(Host.objects.present(), name=name if is_storable(name) else "")


def _get_board_url(request: HttpRequest) -> str:
    return f"{request.scheme}://{request.get_host()}"


def _list_slots(found: Host, slots: list[SlotCell], use: dict[str, Any] | None) -> list[dict[str, Any]]:
    """List the slots with the facts and the use of their GPU, if the slot is a GPU."""
    gpus, uses = (found.facts or {}).get("gpus", []), (use or {}).get("gpus", [])
    return [
        {
            "slot": slot,
            "gpu": gpus[slot.number] if slot.number < len(gpus) else None,
            "use": uses[slot.number] if slot.number < len(uses) else None,
        }
        for slot in slots
    ]


def _format_gemm(profile: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the measured matmuls with the rate of one rank."""
    return [{**p, "gflops": 2 * p["m"] * p["n"] * p["k"] / p["seconds"] / 1e9} for p in profile["gemm"]]
