"""Settings that would open the installation: it does not start with them."""

from __future__ import annotations

from urllib.parse import urlsplit

LOOPBACK = {"127.0.0.1", "localhost", "::1", "[::1]"}
SHORTEST_KEY = 50
FEWEST_CHARACTERS = 5  # different ones, as Django's own check has it


def unsafe(*, secret_key: str, allowed_hosts: list[str], debug: bool, redis_url: str) -> list[str]:
    """Why these settings are refused, one sentence each."""
    found = []
    if len(secret_key) < SHORTEST_KEY or len(set(secret_key)) < FEWEST_CHARACTERS:
        found.append(
            f"MESHBOARD_SECRET_KEY has {len(secret_key)} characters, {len(set(secret_key))} different ones; sessions "
            f"are signed with it, so it needs {SHORTEST_KEY} random ones"
        )
    if any(host in ("", "*") for host in allowed_hosts):
        found.append("MESHBOARD_ALLOWED_HOSTS must name the hosts served; '*' lets any page speak for its visitors")
    if debug and not set(allowed_hosts) <= LOOPBACK:
        found.append("MESHBOARD_DEBUG=1 shows settings and source to whoever meets an error; it is for loopback only")
    redis = urlsplit(redis_url)
    if redis.scheme != "unix" and redis.hostname not in LOOPBACK and not redis.password:
        found.append(f"MESHBOARD_REDIS_URL has no password for {redis.hostname}: whoever reaches it runs jobs")
    return found
