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

from contracts.telemetry.items import TIMED_STEPS
from jobs.core.kinds import format_command
from planner.cost.learning import MIN_TENSOR_BYTES
from planner.report import format_bytes, format_duration

MIN_SIGNED_SHARE = 5e-4  # a smaller share would show as "-0.0%"
MISSING = "\N{EN DASH}"
MIN_DAYS = 2  # shorter durations are in hours
SPAN_UNITS = (("µs", 1e6, 999.5e-6), ("ms", 1e3, 0.9995), ("s", 1.0, 60.0))  # unit, factor, limit in seconds
register = template.Library()


@register.filter
def get(mapping: Mapping[str, Any] | None, key: str) -> Any:
    """`mapping[key]`, or an empty text: keys here hold dots, which the template language reads as a path."""
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
    """Bytes of a rank's tensors below which a measured memory says nothing of them."""
    return MIN_TENSOR_BYTES


@register.simple_tag(takes_context=True)
def turned(context: Mapping[str, Any], number: int, parameter: str) -> str:
    """This page's query, with another page of the list that turns by `parameter`, "" for "page"."""
    query = context["request"].GET.copy()
    query.pop("part", None)
    query[parameter or "page"] = str(number)
    return f"?{query.urlencode()}"


@register.simple_tag
def form_key() -> str:
    """What tells this form, as it is drawn now, from every other."""
    return secrets.token_urlsafe(16)


@register.simple_tag
def sends_mail() -> bool:
    """Return whether the board has a mail server."""
    return bool(settings.EMAIL_HOST)


@register.simple_tag
def timed_steps() -> int:
    """Steps, the last of a run, whose median its end tells."""
    return TIMED_STEPS


@register.filter
def compact(number: int) -> str:
    """Parameters as the field counts them, three digits: 124439808 -> "124M", 405853388800 -> "406B"."""
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
    """A command as one would type it."""
    return shlex.join(words)


@register.filter
def command(script: Mapping[str, Any]) -> str:
    """A script and its arguments, as one would type them."""
    return format_command(script)


@register.filter
def grouped(number: int) -> str:
    """1048576 -> "1,048,576"."""
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
        return f"{offset:.3f} s ± {margin:.3f} s"
    return f"{1e3 * offset:.1f} ms ± {1e3 * margin:.1f} ms"


@register.filter
def binary(num_bytes: int) -> str:
    """1610612736 -> "1.5 GiB"."""
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
def moment(when: datetime | str | None) -> SafeString | str:
    """A <time>, "22 Nov 2026 03:04 UTC"; js/shell/times.js shows it in the reader's own zone."""
    return _time(when, '<time datetime="{}">{} UTC</time>', "%H:%M")


@register.filter
def instant(when: datetime | str | None) -> SafeString | str:
    """Like `moment`, to the second: for what follows one another quickly."""
    return _time(when, '<time datetime="{}" data-exact>{} UTC</time>', "%H:%M:%S")


@register.filter
def age(when: datetime) -> SafeString:
    """How long ago that was, in the words of `ago` in js/format.js, which goes on counting; pointed at, when it was."""
    utc = when.astimezone(UTC)
    seconds = (datetime.now(UTC) - utc).total_seconds()
    title = f"{utc.day} {utc.strftime('%b %Y %H:%M:%S')} UTC"
    return format_html('<span data-age="{}" title="{}">{}</span>', round(seconds, 1), title, ago(seconds))


def ago(seconds: float) -> str:
    """7443 -> "2 h 04 min ago"."""
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
    """The time of a moment today, else its date too: "24 Nov 2026 14:02:11"."""
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
    """Bytes a second in powers of 1000, three digits, as js/format.js writes them: 1250000 -> "1.25 MB/s"."""
    unit = ""
    for unit in ("", "k", "M", "G", "T"):
        if value < 999.5 or unit == "T":
            break
        value /= 1000
    digits = 0 if value >= 99.95 or not unit else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {unit}B/s"


@register.filter
def lasting(seconds: float) -> str:
    """A time of day-to-day life: 42 -> "42 s", 200 -> "3 min", 7300 -> "2 h", 200000 -> "2 days"."""
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
