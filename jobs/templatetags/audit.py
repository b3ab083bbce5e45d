"""Rows of the audit log as sentences: "Created token ci", "priority: 5 → 7"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from django import template
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from jobs.models import AuditEntry, Job
from jobs.templatetags.meshboard import moment

register = template.Library()

ACTIONS = {
    "add": "Added {}",
    "add second factor": "Added a second factor to {}",
    "add sign-on": "Connected a sign-on to {}",
    "archive": "Archived {}",
    "cancel": "Canceled {}",
    "cancel email at end": "Canceled the email at the end of {}",
    "change": "Changed {}",
    "change password": "Changed the password of {}",
    "delete": "Deleted {}",
    "drain": "Drained {}",
    "drained": "Changed draining of {}",
    "edit": "Edited {}",
    "end session": "Ended a session of {}",
    "forget baseline": "Deleted {}",
    "give up": "Marked {} as lost",
    "hold": "Held {}",
    "invite": "Invited a person to {}",
    "join": "Joined {}",
    "make": "Created {}",
    "make account": "Created {} from an invitation",
    "member": "Set the role of a member of {}",
    "move": "Moved {} in the queue",
    "move aside": "Shifted {} in the queue for another job",
    "open run": "Registered the external run {}",
    "own slots": "Changed the slot limit of {}",
    "pause": "Paused {}",
    "ping": "Sent a ping to {}",
    "priority": "Changed the priority of {}",
    "queue again": "Queued {} again",
    "redeliver": "Resent a message to {}",
    "release": "Released {}",
    "remove": "Removed {}",
    "remove member": "Removed a member of {}",
    "remove second factor": "Removed a second factor of {}",
    "remove sign-on": "Removed a sign-on of {}",
    "remove variable": "Removed a variable of {}",
    "request email at end": "Requested an email at the end of {}",
    "restore": "Restored {}",
    "resume": "Resumed {}",
    "revoke": "Revoked {}",
    "revoke all": "Revoked all tokens because {}",
    "revoke invitation": "Revoked an invitation to {}",
    "rotate": "Replaced the secret of {}",
    "run smaller": "Queued {} with a smaller layout",
    "set baseline": "Set {}",
    "set variable": "Set a variable of {}",
    "sign on": "Created {} at the first sign-on",
    "submit": "Submitted {}",
    "tag": "Tagged {}",
    "turn off": "Deactivated {}",
    "undrain": "Undrained {}",
    "untag": "Removed tags of {}",
    "wish for mail": "Changed the email notifications of {}",
}
HOST_JOINED = "Host {} joined the board"  # a host writes this entry itself
FIELDS = {  # of entries whose value has no name
    "drain": "drained",
    "forget baseline": "runs",
    "hold": "held",
    "own slots": "slot limit",
    "pause": "paused",
    "release": "held",
    "resume": "paused",
    "revoke all": "tokens",
    "set baseline": "job",
    "tag": "tags",
    "turn off": "reason",
    "undrain": "drained",
    "untag": "tags",
}
KINDS = {"authtoken": "token", "socialaccount": "sign-on", "usersession": "session"}
NAMED_IN_FACTS = ("token", "webhook")  # the name of the entry is an id, and the facts have the name
OWN_JOBS = "own jobs"
NONE = "none"


class Change(NamedTuple):
    """A field with its new value, and its old value in an entry about a change."""

    field: str
    old: SafeString | str | None
    new: SafeString | str


class AuditSentence(NamedTuple):
    """An entry as the page shows it."""

    entry: AuditEntry
    action: SafeString
    changes: list[Change]


@register.simple_tag
def audit_rows(entries: Iterable[AuditEntry]) -> list[AuditSentence]:
    """Return the rows of these entries. Jobs that still exist become links with their names."""
    listed = list(entries)
    ids = {entry.name for entry in listed if entry.kind == "job"}
    jobs = dict(Job.objects.filter(id__in=ids).values_list("id", "name"))
    return [AuditSentence(entry, _format_action(entry, jobs), get_changes(entry)) for entry in listed]


def _format_action(entry: AuditEntry, jobs: Mapping[str, str]) -> SafeString:
    if (entry.what, entry.kind) == ("join", "host"):
        return format_html(HOST_JOINED, entry.name)
    action = ACTIONS.get(entry.what, entry.what.capitalize() + " {}")
    return format_html(action, _format_object(entry, jobs))


def _format_object(entry: AuditEntry, jobs: Mapping[str, str]) -> SafeString | str:
    """Return the object of an action: 'token ci', 'the queue', or a job as a link."""
    kind, name = KINDS.get(entry.kind, entry.kind), entry.name
    if kind == "job" and name in jobs:
        path = reverse("job-detail", args=[name])
        return format_html('job <a href="{}" title="{}">{}</a>', path, name, jobs[name] or name)
    if kind == "queue":
        return "the queue"
    if entry.what == "revoke all":
        return name
    if kind in NAMED_IN_FACTS:
        facts = [values for values in (entry.after, entry.before) if isinstance(values, dict)]
        name = next((str(values["name"]) for values in facts if values.get("name")), name)
    return f"{kind} {name}"


def get_changes(entry: AuditEntry) -> list[Change]:
    """Return one change per field whose value differs."""
    before, after = entry.before, entry.after
    if entry.what in ("move", "move aside"):
        up = isinstance(before, int | float) and isinstance(after, int | float) and after > before
        return [Change("direction", None, "up" if up else "down")]
    if isinstance(before, dict) and isinstance(after, dict):
        names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        return [
            Change(_format_field(name), _format_value(before.get(name)), _format_value(after.get(name)))
            for name in names
        ]
    only = after if before is None else before
    if isinstance(only, dict) and (before is None or after is None):
        return [Change(_format_field(name), None, _format_value(value)) for name, value in only.items()]
    if before is None and after is None:
        return []
    field = FIELDS.get(entry.what, entry.what if entry.what in ("priority", "drained") else "value")
    if isinstance(after, list) and all(isinstance(each, dict) for each in after):
        fields = _get_changed_fields(after)
        return [Change("changed fields", None, _format_value(fields))] if fields else []
    nullable = entry.what == "own slots"
    if before is None and not nullable:
        return [Change(field, None, _format_value(after))]
    if after is None and not nullable:
        return [Change(field, None, _format_value(before))]
    return [Change(field, _format_value(before), _format_value(after))]


def _format_field(name: str) -> str:
    return name.replace("_", " ") or OWN_JOBS


def _format_value(value: Any) -> SafeString | str:
    return moment(value) if _is_time(value) else _format_text(value)


def _format_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{_format_field(name)} {_format_text(each)}" for name, each in value.items()) or NONE
    if isinstance(value, list):
        return ", ".join(map(_format_text, value)) or NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    return NONE if value in (None, "") else str(value)


def _is_time(value: object) -> bool:
    """Return whether this is a time with its zone, as entries store times."""
    if not isinstance(value, str) or not 19 <= len(value) <= 32:
        return False
    try:
        return datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


def _get_changed_fields(message: list[dict[str, Any]]) -> list[str]:
    """Return the fields that a change message of the Django admin names."""
    parts = [part for each in message for part in each.values() if isinstance(part, dict)]
    return [str(field) for part in parts for field in part.get("fields", ())]
