"""What a doctor finds, of the board or of a host, and how it is told: one line each, and what to do."""

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
DISK_WARN, DISK_FAIL = 0.10, 0.02  # of it free
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Finding(NamedTuple):
    """`advice` is what to do; empty where all is well."""

    level: Level
    subject: str
    words: str
    advice: str = ""


def told(findings: Iterable[Finding]) -> str:
    """For people."""
    lines = []
    for found in findings:
        lines.append(f"{found.level:<5}{found.subject:<12}{found.words}")
        if found.advice:
            lines.append(f"{'':<17}-> {found.advice}")
    return "\n".join(lines)


def as_json(findings: Iterable[Finding]) -> str:
    return json.dumps([found._asdict() for found in findings], indent=2)


def exit_code(findings: Iterable[Finding]) -> int:
    """1 where something fails."""
    return int(any(found.level == "fail" for found in findings))


def of_clock(whose: str, offset_s: float, known_to_s: float) -> Finding:
    """Our clock less another's, known to so many seconds either way."""
    words = f"{offset_s:+.3f} s from the clock of {whose}, accurate to {known_to_s * 1000:.1f} ms"
    if abs(offset_s) - known_to_s < CLOCK_WARN_S:
        return Finding("ok", "clock", words)
    level: Level = "fail" if abs(offset_s) - known_to_s >= CLOCK_FAIL_S else "warn"
    return Finding(
        level,
        "clock",
        words,
        "synchronize both clocks with NTP (chronyc tracking, timedatectl); times on pages are wrong by this offset",
    )


def of_disk(what: str, folder: Path) -> Finding:
    """Of a folder, or of the nearest above that is there."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    try:
        usage = shutil.disk_usage(there)
    except OSError as error:
        return Finding("fail", "disk", f"{what}, {folder}: {error}", "mount the folder, or set another folder")
    share = usage.free / usage.total if usage.total else 0.0
    words = f"{what}, {folder}: {usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"
    if share >= DISK_WARN:
        return Finding("ok", "disk", words)
    return Finding(
        "warn" if share >= DISK_FAIL else "fail", "disk", words, "free disk space, or set a folder on another disk"
    )


def of_names(name: str | None = None) -> Finding:
    """What this machine's own name leads to. Jobs go by addresses; other programs ask for the name."""
    name = socket.gethostname() if name is None else name
    try:
        found = sorted({str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(name, None)})
    except (OSError, UnicodeError) as error:
        return Finding("warn", "names", f"{name!r} does not resolve ({error})", _mend(name))
    words = f"{name!r} resolves to {', '.join(found)}"
    if all(address.startswith("127.") or address == "::1" for address in found):
        return Finding("warn", "names", f"{words}, so a host that uses this name would connect to itself", _mend(name))
    if strangers := [address for address in found if not _is_ours(address)]:
        return Finding(
            "warn", "names", f"{words}, but this machine does not have the address {', '.join(strangers)}", _mend(name)
        )
    return Finding("ok", "names", words)


def is_loopback(url: str) -> bool:
    """Whether only this machine reaches that server."""
    return (urlsplit(url).hostname or "localhost") in LOOPBACK


def _mend(name: str) -> str:
    return f"jobs use IP addresses, so they still work; for other programs, add {name!r} to /etc/hosts or DNS"


def _is_ours(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return address.startswith("fe80:")  # needs its interface named, and is of this link alone
    return True
