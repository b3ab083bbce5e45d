"""Filters of the pages: look-ups, and numbers and times as people read them."""

from __future__ import annotations

import math
import secrets
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from django import template
from django.conf import settings
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from pydantic import ValidationError
from typing_extensions import TypedDict

from contracts.telemetry.items import TIMED_STEPS
from jobs.core.kinds import format_command
from jobs.models import Job
from planner.cost.learning import MIN_TENSOR_BYTES, format_margin
from planner.hardware.cluster import Basis, Cluster
from planner.report import format_bytes, format_duration

MIN_SIGNED_SHARE = 5e-4  # a smaller share would show as "-0.0%"
MISSING = "\N{EN DASH}"
MIN_DAYS = 2  # shorter durations are in hours
SPAN_UNITS = (("µs", 1e6, 999.5e-6), ("ms", 1e3, 0.9995), ("s", 1.0, 60.0))  # unit, factor, limit in seconds
register = template.Library()


@register.filter
def get(mapping: Mapping[str, Any] | None, key: str) -> Any:
    """Return `mapping[key]`, or an empty text. Keys with dots cannot be used in templates."""
    return (mapping or {}).get(key, "")


@register.filter
def with_code(text: str) -> SafeString:
    """Return a text as HTML, with the parts in backquotes as code."""
    parts = str(text).split("`")
    last = len(parts) - 1
    shown = (format_html("<code>{}</code>" if at % 2 and at < last else "{}", part) for at, part in enumerate(parts))
    return format_html_join("", "{}", ((part,) for part in shown))


@register.simple_tag
def least_tensors() -> int:
    """Return the minimum tensor bytes of a rank for which its measured memory is meaningful."""
    return MIN_TENSOR_BYTES


@register.simple_tag(takes_context=True)
def turned(context: Mapping[str, Any], number: int, parameter: str) -> str:
    """Return the query of this page with another page number. `parameter` is "" for "page"."""
    query = context["request"].GET.copy()
    query.pop("part", None)
    query[parameter or "page"] = str(number)
    return f"?{query.urlencode()}"


@register.simple_tag
def form_key() -> str:
    """Return a key that identifies this form as rendered now."""
    return secrets.token_urlsafe(16)


@register.simple_tag
def sends_mail() -> bool:
    """Return whether the board has a mail server."""
    return bool(settings.EMAIL_HOST)


@register.simple_tag
def timed_steps() -> int:
    """Return the number of last steps whose median is the step time of a run."""
    return TIMED_STEPS


@register.filter
def compact(number: int) -> str:
    """Format a number of parameters with three digits, for example 124439808 as "124M"."""
    value, unit = float(number), ""
    for unit in ("", "k", "M", "B", "T"):
        if value < 999.5 or unit == "T":
            break
        value /= 1000
    if not unit:
        return str(number)
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f}{unit}"


@register.filter
def typed(words: list[str]) -> str:
    """Format a command for a shell."""
    return shlex.join(words)


@register.filter
def command(script: Mapping[str, Any]) -> str:
    """Format the command line of a script."""
    return format_command(script)


@register.filter
def grouped(number: int) -> str:
    """Format a number with thousands separators, for example 1048576 as "1,048,576"."""
    return f"{number:,}"


@register.filter
def seconds(value: float) -> str:
    """Format a duration in the unit that suits, for example 0.0123 as "12.30 ms"."""
    return format_duration(value).replace(" us", " µs")


@register.filter
def clock_offset(use: Mapping[str, float]) -> str:
    """Format the clock offset of a host and its margin of error in one unit, for example "1.2 ms ± 0.9 ms"."""
    offset, margin = use["clock_offset_s"], use["round_trip_s"] / 2
    if max(abs(offset), margin) >= 1:
        return f"{offset:z.3f} s ± {margin:.3f} s"
    return f"{1e3 * offset:z.1f} ms ± {1e3 * margin:.1f} ms"


@register.filter
def split_limits(text: str) -> list[tuple[str, str]]:
    """Return each limit of a host with its mechanism (workers.host.job_limits.set_up_limits)."""
    limits, _, missing = text.partition(". No control groups: ")
    rows = [(limit, how.removesuffix(")")) for limit, _, how in (part.partition(" (") for part in limits.split("; "))]
    return [*rows, ("no control groups", missing)] if missing else rows


@register.filter
def binary(num_bytes: int) -> str:
    """Format bytes in powers of 1024, for example 1610612736 as "1.5 GiB"."""
    return format_bytes(num_bytes)


@register.filter
def decimal(num_bytes: float) -> str:
    """Format traffic in powers of 1000, the unit of link rates, for example 14660000 as "14.66 MB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} PB"


@register.filter
def signed_share(value: float) -> str:
    """Format a share as a signed percentage, for example 0.041 as "+4.1%" and -0.0001 as "0.0%"."""
    if abs(value) < MIN_SIGNED_SHARE:
        return "0.0%"
    return f"{value:+.1%}".replace("-", "\N{MINUS SIGN}")


@register.filter
def margin(share: float) -> str:
    """Format a relative margin of error, for example 0.19 as "(±19%)"."""
    return f"({format_margin(share)})"


@register.filter
def moment(when: datetime | str | None) -> SafeString | str:
    """Return a <time> element, which js/shell/times.js shows in the time zone of the user."""
    return _time(when, '<time datetime="{}">{} UTC</time>', "%H:%M")


@register.filter
def instant(when: datetime | str | None) -> SafeString | str:
    """Return a <time> element with seconds."""
    return _time(when, '<time datetime="{}" data-exact>{} UTC</time>', "%H:%M:%S")


@register.filter
def age(when: datetime) -> SafeString:
    """Return the age of a time with the time as a tooltip. js/format.js updates the age."""
    utc = when.astimezone(UTC)
    seconds = (datetime.now(UTC) - utc).total_seconds()
    title = f"{utc.day} {utc.strftime('%b %Y %H:%M:%S')} UTC"
    return format_html('<span data-age="{}" title="{}">{}</span>', round(seconds, 1), title, ago(seconds))


def ago(seconds: float) -> str:
    """Format an age, for example 7443 as "2 h 04 min ago"."""
    whole = int(seconds)
    if whole < 1:
        return "just now"
    if whole >= 2 * 86_400:
        return f"{whole // 86_400} days ago"
    if whole < 60:
        return f"{whole} s ago"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s ago"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min ago"


@register.filter
def since(when: datetime) -> str:
    """Format a time without the date if it is today."""
    utc = when.astimezone(UTC)
    clock = f"{utc:%H:%M:%S}"
    return clock if utc.date() == datetime.now(UTC).date() else f"{utc.day} {utc:%b %Y} {clock}"


def _time(when: datetime | str | None, element: str, clock: str) -> SafeString | str:
    if not when:
        return ""
    utc = (datetime.fromisoformat(when) if isinstance(when, str) else when).astimezone(UTC)
    return format_html(element, utc.isoformat(), f"{utc.day} {utc.strftime(f'%b %Y {clock}')}")


@register.filter
def byte_rate(value: float) -> str:
    """Format bytes per second like js/format.js, for example 1250000 as "1.25 MB/s"."""
    unit = ""
    for unit in ("", "k", "M", "G", "T"):
        if value < 999.5 or unit == "T":
            break
        value /= 1000
    digits = 0 if value >= 99.95 or not unit else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {unit}B/s"


@register.filter
def lasting(seconds: float) -> str:
    """Format a rounded duration, for example 200 as "3 min" and 200000 as "2 days"."""
    for length, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length or (unit != "days" and seconds >= length):
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


@register.filter
def span(seconds: float | None) -> str:
    """Format a duration like `duration` in js/format.js, for example 0.0123 as "12.3 ms" and 65 as "1 min 05 s"."""
    if seconds is None or seconds < 0:
        return MISSING
    if seconds < 60:
        unit, value = next((u, seconds * by) for u, by, most in SPAN_UNITS if seconds < most)
        return f"{_three_digits(value)} {unit}"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < MIN_DAYS * 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def _three_digits(value: float) -> str:
    return f"{value:.{0 if value >= 99.95 or not value else 1 if value >= 9.995 else 2}f}"


@register.filter
def loss_value(value: float | None) -> str:
    """Format a loss like `loss` in js/format.js, for example "2.4931"."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite"
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.2e}".replace("e+0", "e+")


@register.filter
def in_unit(value: float, unit: str) -> str:
    """Format a value by its unit, which is "bytes" (of memory), "traffic", "seconds", "loss", or "count"."""
    if unit == "bytes":
        return format_bytes(int(value))
    if unit == "traffic":
        return decimal(value)
    if unit == "seconds":
        return seconds(value)
    return f"{value:.4f}" if unit == "loss" else f"{value:,.0f}"


class LinkRates(TypedDict):
    """Bytes per second that a rank can send in its node of `per_node` ranks, and to other nodes.

    `link_runs`: number of runs that measured `node_bytes_per_s`, 0 if the rate comes from `basis`.
    """

    name: str
    basis: Basis
    per_node: int
    node_bytes_per_s: float
    network_bytes_per_s: float
    link_runs: int


@register.filter
def link_speeds(job: Job) -> LinkRates | None:
    """Return the link rates of the hardware for which a job was planned, or None."""
    if not job.hardware:
        return None
    try:
        cluster = Cluster.model_validate(job.hardware, strict=False)
    except ValidationError:  # stored by an earlier version
        return None
    return {
        "name": cluster.name,
        "basis": cluster.basis,
        "per_node": cluster.per_node,
        "node_bytes_per_s": cluster.node.bytes_per_s,
        "network_bytes_per_s": cluster.network.bytes_per_s,
        "link_runs": cluster.num_rate_runs,
    }
