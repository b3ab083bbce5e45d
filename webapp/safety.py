"""Settings that would open the installation: it does not start with them.

`unsafe` is asked of every process, by the settings themselves. What holds only where others reach the board are checks
of Django's `check --deploy`: an error there keeps web, controller and recorder from starting.
"""

from __future__ import annotations

import logging
import os
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register, run_checks
from django.core.exceptions import ImproperlyConfigured

from webapp.unknown import unknown

log = logging.getLogger(__name__)

LOOPBACK = {"127.0.0.1", "localhost", "::1", "[::1]"}
SHORTEST_KEY = 50
FEWEST_CHARACTERS = 5  # different ones, as Django's own check has it
PRINTED_KEYS = ("only-for-", "django-insecure-")  # how keys begin that stand in somebody's source


def unsafe(*, secret_key: str, allowed_hosts: list[str], debug: bool, redis_url: str) -> list[str]:
    """Why these settings are refused, one sentence each."""
    found = []
    if len(secret_key) < SHORTEST_KEY or len(set(secret_key)) < FEWEST_CHARACTERS:
        found.append(
            f"MESHBOARD_SECRET_KEY has {len(secret_key)} characters, of which {len(set(secret_key))} are different. "
            f"The key signs sessions. Use {SHORTEST_KEY} random characters."
        )
    if any(host in ("", "*") for host in allowed_hosts):
        found.append(
            "MESHBOARD_ALLOWED_HOSTS contains '*', "
            "so any website can send requests as a visitor. List the host names of the board."
        )
    if debug and not set(allowed_hosts) <= LOOPBACK:
        found.append(
            "MESHBOARD_DEBUG=1 shows settings and source code on error pages. Use this setting only on loopback."
        )
    redis = urlsplit(redis_url)
    if redis.scheme != "unix" and redis.hostname not in LOOPBACK and not redis.password:
        found.append(
            f"MESHBOARD_REDIS_URL has no password for {redis.hostname}, "
            "so anyone who reaches Redis can run jobs. Set a password."
        )
    return found


@register(Tags.security, deploy=True)
def exposed(app_configs: Any, **_: Any) -> list[CheckMessage]:
    """What a board that others reach must not have."""
    if set(settings.ALLOWED_HOSTS) <= LOOPBACK:
        return []
    found: list[CheckMessage] = []
    if settings.SECRET_KEY.startswith(PRINTED_KEYS):
        words = "MESHBOARD_SECRET_KEY is a published example key, so anyone can forge a session."
        found.append(Error(words, hint=f"Use {SHORTEST_KEY} random characters.", id="meshboard.E001"))
    database = settings.DATABASES["default"]
    if database["ENGINE"].endswith("postgresql") and _is_open(database):
        words = (
            f"MESHBOARD_DATABASE_URL has no password for {database['HOST']}, "
            "so anyone who reaches the database can change all data."
        )
        found.append(Error(words, hint="Set a password, sslcert=, or passfile=.", id="meshboard.E002"))
    if settings.HTTPS and not settings.TRUSTED_PROXIES:
        words = "MESHBOARD_TRUSTED_PROXIES is empty, so login limits count all visitors behind a proxy as one address."
        found.append(Warning(words, id="meshboard.W001"))
    return found


@register()
def ignored(app_configs: Any, **_: Any) -> list[CheckMessage]:
    """What somebody set in vain."""
    return [Warning(words, id="meshboard.W002") for words in unknown(os.environ)]


def _is_open(database: dict[str, Any]) -> bool:
    host = database.get("HOST", "")
    by_file = {"passfile", "sslcert", "service"} & set(database.get("OPTIONS", {}))
    return not (host in LOOPBACK or host == "" or host.startswith("/") or database.get("PASSWORD") or by_file)


def refuse_exposed() -> None:
    """Raises ImproperlyConfigured with every error of `check --deploy`; warnings of ours are in the log."""
    told_of = run_checks(include_deployment_checks=True)
    for told in told_of:
        if str(told.id).startswith("meshboard.") and not told.is_serious():
            log.warning("%s: %s", told.id, told.msg)
    found = [told for told in told_of if told.is_serious()]
    if found:
        raise ImproperlyConfigured("\n".join(f"{told.id}: {told.msg}" for told in found))
