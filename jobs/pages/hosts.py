"""Hosts as everybody sees them, what staff may do to them, and what a calibration measured of one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_GET, require_POST

from jobs.core.access import may_change_hosts, visible_jobs
from jobs.core.pagination import page_of
from jobs.core.text import storable, whole_number
from jobs.models import LIVE, Host, Job, JoinToken
from jobs.planning.queries import checked
from jobs.queue import actions
from jobs.queue import staff_actions as staff
from jobs.queue.hosts import joining
from jobs.queue.hosts.checks import versions_of
from jobs.queue.hosts.presentation import STATES, TONES, SlotShown, grid, listed, sees_inside, state_of
from jobs.queue.scheduling.snapshot import free_slots
from planner.facts.validation import SpecError

View = Callable[..., HttpResponse]


def for_staff(view: View) -> View:
    """Posts of staff with the right to change hosts."""

    @require_POST
    @login_required
    @wraps(view)
    def guarded(request: HttpRequest, *arguments: Any, **named: Any) -> HttpResponse:
        if not may_change_hosts(request.user):
            raise PermissionDenied
        return view(request, *arguments, **named)

    return cast(View, guarded)


@require_GET
@login_required
def hosts(request: HttpRequest) -> HttpResponse:
    """A page of the hosts, with their slots, narrowed by `q` in their names and by `state`; `?part=grid` is what
    follows them live."""
    asked = {name: request.GET.get(name, "").strip() for name in ("q", "state")}
    found = listed(asked["q"], asked["state"] if asked["state"] in STATES else "", request.GET.get("page"))
    free = free_slots()
    context: dict[str, Any] = {
        "grid": grid(found.hosts, request.user, free),
        "free": sum(free.values()),
        "tones": TONES,
        "listed": found,
        "asked": asked,
    }
    if request.GET.get("part") == "grid":
        return render(request, "hosts/grid.html", context)
    if may_change_hosts(request.user):
        context |= _of_tokens(request)
    return render(request, "hosts/list.html", context)


@require_GET
@login_required
def host(request: HttpRequest, name: str) -> HttpResponse:
    """One host, and its calibration; `?part=live` is what follows it live."""
    found = _find(name)
    shown, state = grid([found], request.user, free_slots()), state_of(found)
    context: dict[str, Any] = {
        "host": found,
        "shown": shown,
        "slots": _with_gpus(found, shown.hosts[0].slots, found.use if shown.hosts[0].gauges else None),
        "state": state,
        "tone": TONES[state],
        "gauges": shown.hosts[0].gauges,
        "sees_inside": sees_inside(request.user),
    }
    if request.GET.get("part") == "live":
        return render(request, "hosts/live.html", context)
    context |= {
        "profile": found.profile,
        "gemm": _gemm(found.profile) if found.profile else [],
        "running": _running(request.user, found),
        "versions": versions_of(found.facts),
        "may_change": may_change_hosts(request.user),
        "live_members": found.members.filter(ended=None).count(),
    }
    return render(request, "hosts/detail.html", context)


@for_staff
def calibrate(request: HttpRequest, name: str) -> HttpResponse:
    """Queue a calibration, then to its job."""
    try:
        job = actions.calibrate(cast(User, request.user), _find(name))
    except actions.NotCalibratedError as error:
        messages.error(request, str(error))
        return redirect("host", name)
    return redirect("job-detail", job.id)


@for_staff
def drain(request: HttpRequest, name: str) -> HttpResponse:
    if staff.drain(_find(name), True, by(request)):
        messages.success(request, f"Host {name} is drained. Running jobs continue.")
    return redirect("host", name)


@for_staff
def undrain(request: HttpRequest, name: str) -> HttpResponse:
    if staff.drain(_find(name), False, by(request)):
        messages.success(request, f"Host {name} is undrained.")
    return redirect("host", name)


@for_staff
def give_up(request: HttpRequest, name: str) -> HttpResponse:
    """Its attempts are lost, its slots free."""
    try:
        lost = actions.give_up_host(_find(name), by(request))
    except actions.HostConnectedError:
        messages.error(request, f"Host {name} has contact again. Cancel the jobs on the host instead.")
        return redirect("host", name)
    messages.success(request, f"Marked host {name} and {lost} attempt{'' if lost == 1 else 's'} as lost.")
    return redirect("host", name)


@for_staff
def remove(request: HttpRequest, name: str) -> HttpResponse:
    """Its name is free, and it is nobody."""
    try:
        staff.remove(_find(name), by(request))
    except staff.BusyHostError as error:
        messages.error(request, str(error))
        return redirect("host", name)
    messages.success(request, f"Removed host {name}, and the key and Redis user of the host.")
    return redirect("hosts")


@for_staff
def make_token(request: HttpRequest) -> HttpResponse:
    """The only page that shows it."""
    try:
        asked = checked(joining.TokenQuery, _asked(request.POST))
    except SpecError as error:
        messages.error(request, " ".join(problem.sentence for problem in error.problems))
        return redirect("hosts")
    token, text = staff.make_token(by(request), asked)
    answer = render(request, "hosts/token.html", {"token": token, "text": text, "board": _board(request)})
    answer["Cache-Control"] = "no-store"
    return answer


@for_staff
def revoke_token(request: HttpRequest, key: str) -> HttpResponse:
    number = whole_number(key, 1, 2**63 - 1)
    if staff.revoke_token(get_object_or_404(JoinToken, pk=number or 0), by(request)):
        messages.success(request, "The join token is revoked. Hosts that joined with the token stay on the board.")
    return redirect("hosts")


def by(request: HttpRequest) -> str:
    return cast(User, request.user).get_username()


def _find(name: str) -> Host:
    return get_object_or_404(Host.objects.present(), name=name if storable(name) else "")


def _board(request: HttpRequest) -> str:
    return f"{request.scheme}://{request.get_host()}"


def _of_tokens(request: HttpRequest) -> dict[str, Any]:
    return {
        "may_change": True,
        "kept": (kept := page_of(request, joining.known(), "tokens")),
        "tokens": [{"token": token, "problem": joining.why_not(token)} for token in kept],
        "board": _board(request),
    }


def _asked(form: QueryDict) -> dict[str, Any]:
    """A form's fields as JSON would have them: what is no number goes on as it is, to be named."""
    asked: dict[str, Any] = {"note": form.get("note", "").strip(), "labels": form.get("labels", "").split()}
    for name in ("hours", "uses"):
        if told := form.get(name, ""):
            number = whole_number(told, 0, 10**6)
            asked[name] = told if number is None else number
    return asked


def _with_gpus(found: Host, slots: list[SlotShown], use: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Every slot with its GPU, where it is one."""
    gpus, uses = (found.facts or {}).get("gpus", []), (use or {}).get("gpus", [])
    return [
        {
            "slot": slot,
            "gpu": gpus[slot.number] if slot.number < len(gpus) else None,
            "use": uses[slot.number] if slot.number < len(uses) else None,
        }
        for slot in slots
    ]


def _running(user: Any, found: Host) -> Job | None:
    """A calibration of this host that has not ended, if the user may know of it."""
    jobs = visible_jobs(user).filter(status__in=LIVE, kind="calibrate", wanted_host=found.name)
    return jobs.order_by("created").first()


def _gemm(profile: dict[str, Any]) -> list[dict[str, Any]]:
    """Products by size with the rate of one rank."""
    return [{**p, "gflops": 2 * p["m"] * p["n"] * p["k"] / p["seconds"] / 1e9} for p in profile["gemm"]]
