"""Checks of settings.

`find_unsafe_settings` runs in each process. Checks of a board that others can reach run with `check --deploy`. An error
of a check stops web, controller, and recorder. Checks of the database run before migrations.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Collection, Iterable
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register, run_checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from webapp.environment import PREFIX, RunnerSettings, WebSettings, is_secret

# Variables of hosts, the command, its meter, CI, and docker-compose.yml.
OTHER_VARIABLES = (  # noqa: SIM905  # a list would have forty lines
    "ADDRESS ALLOW_ROOT_JOBS BASELINE CA CHECKPOINT_ROOT CLIENT CONTROL_GROUPS DATABASE_MEMORY DATABASE_PASSWORD "
    "DATA_ROOT DEVICE GATE_OPTIONS GPU_HOST_NAME GPU_RUN_DIR GPU_SLOTS GROUP_TIMEOUT_S HOST_KEY HOST_MEMORY HOST_NAME "
    "HOST_STATE_DIR HTTPS_PORT HTTP_PORT JOB_CPUS JOB_DISK_BYTES JOB_MEMORY_BYTES JOB_OPEN_FILES JOB_PROCESSES "
    "JOB_USER JOIN_INSECURE JOIN_TOKEN KEEP_RUNS_BYTES KEEP_RUNS_DAYS LOG_BYTES MIN_FREE_BYTES REDIS_MEMORY "
    "REDIS_PASSWORD RUN RUN_DIR SANDBOX SCRIPT_ROOT SET_BASELINE SHARED_GPU_BYTES SLOTS SPEC STREAM_BYTES TLS_DIR "
    "TOKEN PROJECT SUBMIT_OPTIONS TELEMETRY TRAINER_MODULE UPLOAD_ENVIRONMENTS URL WEB_MEMORY"
).split()
FILE_VARIABLES = [
    "join_token_file",
    *(f"{name}_file" for name, field in WebSettings.model_fields.items() if is_secret(field)),
]
KNOWN_VARIABLES = {
    *OTHER_VARIABLES,
    *(name.upper() for name in (*RunnerSettings.model_fields, *WebSettings.model_fields, *FILE_VARIABLES)),
}


def describe_unknown_variables(names: Iterable[str]) -> list[str]:
    """Return a sentence for each MESHBOARD_ variable that is not a setting."""
    return [_describe_variable(name.removeprefix(PREFIX)) for name in sorted(names) if _is_unknown(name)]


def _is_unknown(name: str) -> bool:
    return name.startswith(PREFIX) and name.removeprefix(PREFIX) not in KNOWN_VARIABLES


def _describe_variable(own: str) -> str:
    words = f"{PREFIX}{own} is not a setting, so Meshboard ignores it."
    if own.removesuffix("_FILE") in KNOWN_VARIABLES:
        return f"{words} {PREFIX}{own.removesuffix('_FILE')} is not a secret, so it cannot be read from a file."
    alike = difflib.get_close_matches(own, sorted(KNOWN_VARIABLES), 1)
    return f"{words} Did you mean {PREFIX}{alike[0]}?" if alike else words


log = logging.getLogger(__name__)

LOOPBACK = {"127.0.0.1", "localhost", "::1", "[::1]"}
MIN_KEY_CHARACTERS = 50
MIN_DISTINCT_CHARACTERS = 5  # like the check of Django
PUBLISHED_KEY_PREFIXES = ("only-for-", "django-insecure-")  # of keys in source code


def find_unsafe_settings(*, secret_key: str, allowed_hosts: list[str], debug: bool, redis_url: str) -> list[str]:
    """Return a sentence for each setting with which Meshboard does not start."""
    found = []
    if len(secret_key) < MIN_KEY_CHARACTERS or len(set(secret_key)) < MIN_DISTINCT_CHARACTERS:
        found.append(
            f"MESHBOARD_SECRET_KEY has {len(secret_key)} characters, of which {len(set(secret_key))} are different. "
            f"The key signs sessions. Use {MIN_KEY_CHARACTERS} random characters."
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
def check_exposed_board(app_configs: Any, **_: Any) -> list[CheckMessage]:
    """Check the settings of a board that others can reach."""
    if set(settings.ALLOWED_HOSTS) <= LOOPBACK:
        return []
    found: list[CheckMessage] = []
    if settings.SECRET_KEY.startswith(PUBLISHED_KEY_PREFIXES):
        words = "MESHBOARD_SECRET_KEY is a published example key, so anyone can forge a session."
        found.append(Error(words, hint=f"Use {MIN_KEY_CHARACTERS} random characters.", id="meshboard.E001"))
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
def check_unknown_variables(app_configs: Any, **_: Any) -> list[CheckMessage]:
    """Warn of MESHBOARD_ variables that are not settings."""
    return [Warning(words, id="meshboard.W002") for words in describe_unknown_variables(os.environ)]


@register(Tags.database)
def check_database_encoding(app_configs: Any, databases: Collection[str] | None = None, **_: Any) -> list[CheckMessage]:
    """Check that PostgreSQL stores text as UTF-8. `migrate` runs this check before the first start."""
    found: list[CheckMessage] = []
    for alias in databases or ():
        if (connection := connections[alias]).vendor != "postgresql":
            continue
        with connection.cursor() as cursor:
            cursor.execute("SHOW server_encoding")
            [encoding] = cursor.fetchone()
        if encoding != "UTF8":
            name = connection.settings_dict["NAME"]
            words = (
                f"The PostgreSQL database {name} has the encoding {encoding}, which cannot store all text correctly."
            )
            hint = f"Run CREATE DATABASE {name} ENCODING 'UTF8' TEMPLATE template0, or use another UTF8 database."
            found.append(Error(words, hint=hint, id="meshboard.E003"))
    return found


def _is_open(database: dict[str, Any]) -> bool:
    host = database.get("HOST", "")
    by_file = {"passfile", "sslcert", "service"} & set(database.get("OPTIONS", {}))
    return not (host in LOOPBACK or host == "" or host.startswith("/") or database.get("PASSWORD") or by_file)


def run_deploy_checks() -> None:
    """Run `check --deploy`, and log warnings of Meshboard.

    Raises:
        ImproperlyConfigured: A check found an error.
    """
    messages = run_checks(include_deployment_checks=True)
    for message in messages:
        if str(message.id).startswith("meshboard.") and not message.is_serious():
            log.warning("%s: %s", message.id, message.msg)
    found = [message for message in messages if message.is_serious()]
    if found:
        raise ImproperlyConfigured("\n".join(f"{message.id}: {message.msg}" for message in found))
