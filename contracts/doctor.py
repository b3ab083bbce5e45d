"""Checks that the doctors of the board and of a host share, and the format of their findings."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

Level = Literal["ok", "warn", "fail"]
CLOCK_WARN_S, CLOCK_FAIL_S = 1.0, 30.0
MIN_FREE_DISK_FRACTION, CRITICAL_FREE_DISK_FRACTION = 0.10, 0.02
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Finding(NamedTuple):
    """Result of one check. `advice` is empty if the check passed."""

    level: Level
    subject: str
    words: str
    advice: str = ""


def format_findings(findings: Iterable[Finding]) -> str:
    """Format findings as lines for people."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<5}{finding.subject:<12}{finding.words}")
        if finding.advice:
            lines.append(f"{'':<17}-> {finding.advice}")
    return "\n".join(lines)


def format_findings_as_json(findings: Iterable[Finding]) -> str:
    """Format findings as a JSON list."""
    return json.dumps([finding._asdict() for finding in findings], indent=2)


def get_exit_code(findings: Iterable[Finding]) -> int:
    """Return 1 if a check failed, else 0."""
    return int(any(finding.level == "fail" for finding in findings))


def check_clock(other: str, offset_s: float, accuracy_s: float) -> Finding:
    """Check the offset of this clock from another clock, measured to within `accuracy_s`."""
    words = f"{offset_s:+.3f} s from the clock of {other}, accurate to {accuracy_s * 1000:.1f} ms"
    if abs(offset_s) - accuracy_s < CLOCK_WARN_S:
        return Finding("ok", "clock", words)
    level: Level = "fail" if abs(offset_s) - accuracy_s >= CLOCK_FAIL_S else "warn"
    return Finding(
        level,
        "clock",
        words,
        "synchronize both clocks with NTP (chronyc tracking, timedatectl); times on pages are wrong by this offset",
    )


def check_disk(purpose: str, folder: Path) -> Finding:
    """Check the free space of the disk of a folder, or of its nearest parent that exists."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    try:
        usage = shutil.disk_usage(existing)
    except OSError as error:
        return Finding("fail", "disk", f"{purpose}, {folder}: {error}", "mount the folder, or set another folder")
    free_fraction = usage.free / usage.total if usage.total else 0.0
    words = f"{purpose}, {folder}: {usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"
    if free_fraction >= MIN_FREE_DISK_FRACTION:
        return Finding("ok", "disk", words)
    level: Level = "warn" if free_fraction >= CRITICAL_FREE_DISK_FRACTION else "fail"
    return Finding(level, "disk", words, "free disk space, or set a folder on another disk")


def check_host_name(name: str | None = None) -> Finding:
    """Check that the name of this machine resolves to an address of this machine.

    Jobs connect by address. Other programs resolve the name.
    """
    name = socket.gethostname() if name is None else name
    advice = f"jobs use IP addresses, so they still work; for other programs, add {name!r} to /etc/hosts or DNS"
    try:
        addresses = sorted({str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(name, None)})
    except (OSError, UnicodeError) as error:
        return Finding("warn", "names", f"{name!r} does not resolve ({error})", advice)
    words = f"{name!r} resolves to {', '.join(addresses)}"
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        return Finding("warn", "names", f"{words}, so a host that uses this name would connect to itself", advice)
    if foreign := [address for address in addresses if not _is_own_address(address)]:
        return Finding(
            "warn", "names", f"{words}, but this machine does not have the address {', '.join(foreign)}", advice
        )
    return Finding("ok", "names", words)


def is_loopback(url: str) -> bool:
    """Return True if only this machine can reach the server at `url`."""
    return (urlsplit(url).hostname or "localhost") in LOOPBACK


def _is_own_address(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return address.startswith("fe80:")  # a link-local address needs its interface to bind
    return True
