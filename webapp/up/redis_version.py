"""Which Redis answers, and whether it is older than the fix of a known way in."""

from __future__ import annotations

import ipaddress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

# CVE-2025-49844: whoever may run a script runs code in the server. First fixed patch of each series that has one.
FIXED = {
    "Redis": {(6, 2): 20, (7, 2): 11, (7, 4): 6, (8, 0): 4, (8, 2): 2},
    "Valkey": {(7, 2): 11, (8, 0): 6, (8, 1): 4},
}


class RedisVersion(NamedTuple):
    """What a server says that it is."""

    kind: str
    version: str

    def __str__(self) -> str:
        return f"{self.kind} {self.version}"

    @property
    def gives_rights(self) -> bool:
        """Return whether users can have rights to single keys (jobs/queue/hosts/rights.py): Redis 7.0 or Valkey."""
        return int(self.version.split(".")[0]) >= 7

    @property
    def has_hole(self) -> bool:
        """True when this version came before the fix, unless whoever packaged it has mended it under the old number."""
        major, minor, patch = (int(part) for part in self.version.split(".")[:3])
        series = FIXED[self.kind]
        if (major, minor) > max(series):
            return False
        return patch < series[major, minor] if (major, minor) in series else True


def redis_version(info: dict[str, Any]) -> RedisVersion:
    """From the answer to INFO. Valkey also tells the Redis version that it stands in for."""
    if "valkey_version" in info:
        return RedisVersion("Valkey", str(info["valkey_version"]))
    return RedisVersion("Redis", str(info["redis_version"]))


def warning(version: RedisVersion, url: str) -> str | None:
    """What to tell of a server with a hole that others than this machine can reach, or None."""
    if not version.has_hole or _is_loopback(urlsplit(url).hostname or "localhost"):
        return None
    return (
        f"{version} at {urlsplit(url).hostname} lacks the fix of CVE-2025-49844, so anyone with the Redis password "
        "can run code on the server. Update Redis, unless your distribution has backported the fix."
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
