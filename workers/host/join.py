"""Join this machine to a board as a host, and run its worker: `python -m workers.host.join URL --token TOKEN`.

The token is needed once. The board's response is stored in a file with mode 0600 below the state directory. With this
file the host can start again, also while the board is unreachable. Environment variables set everything else
(docs/reference/host-settings.md).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any, NoReturn
from urllib.parse import urlsplit

from contracts.hosts import JOIN_PATH, JoinRequest, JoinResponse
from contracts.names import host_queue
from contracts.security import SecretError, read_secret_file
from workers.host.hardware import Gpus
from workers.host.machine import describe_device, get_boot_id, get_host_facts
from workers.host.run_lock import lock_replica, lock_run_dir, pass_lock
from workers.host.settings import (
    BOARD_URL_VARIABLE,
    REPLICA_MARK,
    TEXT_LOG_FORMAT,
    HostCredentials,
    HostSettingError,
    HostSettings,
    get_credentials_file,
    get_log_format,
    get_log_level,
    get_variable,
    is_enabled,
    load_or_create_credentials,
    read_host_settings,
    save_credentials,
    set_up_json_logs,
)

log = logging.getLogger(__name__)

TOKEN_VARIABLE = "MESHBOARD_JOIN_TOKEN"  # noqa: S105 - the name of a variable
REQUEST_TIMEOUT_S = 20.0
MAX_BOARD_WAIT_S = 10.0  # of a host that has joined before
MIN_RETRY_INTERVAL_S, MAX_RETRY_INTERVAL_S = 0.5, 30.0
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
MAX_ANSWER_BYTES = 64 * 2**10


class JoinRefusedError(Exception):
    """A rejection that a retry will not change."""


class UnreachableError(Exception):
    """A missing response, or a response that asks for a retry."""


def main() -> int:
    options = _parse_options(sys.argv[1:])
    try:
        if get_log_format() == "json":
            set_up_json_logs()
        else:
            logging.basicConfig(level=get_log_level(), format=TEXT_LOG_FORMAT)
        url = _check_url(options.url, options.insecure or is_enabled("MESHBOARD_JOIN_INSECURE"))
        lock, settings = _read_settings(options)
        token = options.token or read_secret_file(TOKEN_VARIABLE) or os.environ.get(TOKEN_VARIABLE, "")
        credentials = _join(url, settings, token)
    except (HostSettingError, SecretError, JoinRefusedError) as error:
        print(f"meshboard: {error}", file=sys.stderr)
        return 1
    os.environ[BOARD_URL_VARIABLE] = url
    return _run_worker(settings, credentials, lock)


def build_worker_command(name: str) -> list[str]:
    """Return the argv of the Celery worker, which contacts only its own queue."""
    # Only root can run jobs as other users, so Celery's warning about root is wrong here.
    no_warning = "ignore:You're running the worker with superuser privileges"
    quiet = ["--quiet"] if get_log_format() == "json" else []  # a banner is not JSON
    celery = [sys.executable, "-W", no_warning, "-m", "celery", *quiet, "-A", "workers.host.app", "worker"]
    options = ["--pool", "threads", "--concurrency", "2", "--without-mingle", "--without-gossip", "--without-heartbeat"]
    names = ["--queues", host_queue(name), "--hostname", f"host-{name}@%h"]
    return [*celery, *options, "--loglevel", get_log_level(), *names]


def _parse_options(argv: list[str]) -> argparse.Namespace:
    env = os.environ
    parser = argparse.ArgumentParser(prog="python -m workers.host.join", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "url", nargs="?", default=env.get(BOARD_URL_VARIABLE, ""), help="address of the board (default: MESHBOARD_URL)"
    )
    parser.add_argument(
        "--token",
        help="join token, visible in the process list "
        f"(default: {TOKEN_VARIABLE}, or the file in {TOKEN_VARIABLE}_FILE)",
    )
    parser.add_argument("--name", help="name of the host (default: MESHBOARD_HOST_NAME, or the machine name)")
    parser.add_argument(
        "--slots",
        help="number of slots (default: MESHBOARD_SLOTS, else the number of GPUs, else CPU cores, at least 4)",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="send the token over plain http:// to another machine (default: MESHBOARD_JOIN_INSECURE=1)",
    )
    return parser.parse_args(argv)


def _check_url(url: str, insecure: bool) -> str:
    """Return the board's address without a trailing slash. Raises HostSettingError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise HostSettingError(f"The address of the board is {url[:100]!r}. Use https://HOST.")
    if parts.scheme == "http" and parts.hostname not in LOOPBACK_NAMES and not insecure:
        raise HostSettingError(
            f"{url[:100]} would send the token and the host key unencrypted. Use https://, or --insecure."
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def _read_settings(options: argparse.Namespace) -> tuple[int, HostSettings]:
    """Read the settings, lock the run directory, and set variables for the worker. The command line has priority.

    Returns the descriptor of the lock, and the settings. Raises HostSettingError.
    """
    env = os.environ
    if options.slots is not None:
        env["MESHBOARD_SLOTS"] = options.slots
    if options.name is not None:
        env["MESHBOARD_HOST_NAME"] = options.name
    settings, name = read_host_settings(joined=False), get_variable("MESHBOARD_HOST_NAME")
    if REPLICA_MARK in name:
        lock, settings = lock_replica(settings, name)
        env["MESHBOARD_RUN_DIR"] = str(settings.run_dir)
    else:
        lock = lock_run_dir(settings)
    env |= {"MESHBOARD_HOST_NAME": settings.name, "MESHBOARD_DEVICE": settings.device}
    env["MESHBOARD_SLOTS"] = str(settings.slots)
    return lock, settings


def _join(url: str, settings: HostSettings, token: str) -> HostCredentials:
    """Return the credentials from the board, or the stored ones. Raises HostSettingError, JoinRefusedError."""
    path = get_credentials_file(settings.state_dir, settings.name)
    stored = load_or_create_credentials(path)
    request = _build_request(settings, stored.identity, token)
    began, interval_s, last_problem = time.monotonic(), MIN_RETRY_INTERVAL_S, ""
    while True:
        try:
            joined = _send(url, request)
            break
        except UnreachableError as error:
            if stored.key and time.monotonic() - began > MAX_BOARD_WAIT_S:
                log.warning("%s: continuing with the settings stored in %s", error, path)
                return stored
            if str(error) != last_problem:
                last_problem = str(error)
                log.info("%s: retrying", last_problem)
        time.sleep(interval_s)
        interval_s = min(MAX_RETRY_INTERVAL_S, interval_s * 2)
    credentials = HostCredentials(stored.identity, joined["redis_url"], joined["key"])
    save_credentials(path, credentials)
    log.info("joined %s as %s", url, joined["name"])
    return credentials


def _build_request(settings: HostSettings, identity: str, token: str) -> JoinRequest:
    device_name, memory_bytes = describe_device(settings)
    request = JoinRequest(
        name=settings.name,
        identity=identity,
        slots=settings.slots,
        device=settings.device,
        device_name=device_name,
        memory_bytes=memory_bytes,
        boot_id=get_boot_id(),
        facts=get_host_facts(Gpus(), []),
    )
    if token:
        request["token"] = token
    return request


def _send(url: str, body: JoinRequest) -> JoinResponse:
    """Send the request to the board. Raises UnreachableError, JoinRefusedError."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + JOIN_PATH, json.dumps(body).encode(), headers)  # noqa: S310 - checked
    opener = urllib.request.build_opener(_NoRedirect)
    try:
        with opener.open(request, timeout=REQUEST_TIMEOUT_S) as response:
            answer: JoinResponse = json.loads(response.read(MAX_ANSWER_BYTES))
            return JoinResponse(name=answer["name"], redis_url=answer["redis_url"], key=answer["key"])
    except urllib.error.HTTPError as error:
        problem = f"{url} returned HTTP {error.code}: {_get_reason(error)}"
        if error.code in (429, 502, 503, 504):
            raise UnreachableError(problem) from None
        raise JoinRefusedError(problem) from None
    except (ssl.SSLCertVerificationError, ssl.CertificateError) as error:
        raise JoinRefusedError(f"The certificate of {url} is invalid: {error}") from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            raise JoinRefusedError(
                f"The certificate of {url} is invalid: {error.reason}. Set SSL_CERT_FILE to its CA certificates."
            ) from None
        raise UnreachableError(f"Cannot reach {url}: {error.reason}") from None
    except (OSError, HTTPException) as error:
        raise UnreachableError(f"Cannot reach {url}: {error}") from None
    except (ValueError, KeyError, TypeError):
        raise JoinRefusedError(f"{url} is not a Meshboard board") from None


def _get_reason(error: urllib.error.HTTPError) -> str:
    """Return the board's error messages, or the reason phrase if another server responded."""
    location = error.headers.get("Location")
    if location is not None:
        return f"it is at {location[:200]}"
    try:
        answer: Any = json.loads(error.read(MAX_ANSWER_BYTES))
        return "; ".join(f"{entry['field']}: {entry['message']}" for entry in answer["errors"])[:1000]
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        return str(error.reason)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follow no redirect. The token must go only to the given address."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _run_worker(settings: HostSettings, credentials: HostCredentials, lock: int) -> NoReturn:
    """Replace this process by the Celery worker, which keeps the lock of the run directory."""
    env = {k: v for k, v in os.environ.items() if k not in (TOKEN_VARIABLE, f"{TOKEN_VARIABLE}_FILE")}
    env |= {"MESHBOARD_REDIS_URL": credentials.redis_url, "MESHBOARD_HOST_KEY": credentials.key, **pass_lock(lock)}
    argv = build_worker_command(settings.name)
    sys.stdout.flush()
    os.execve(argv[0], argv, env)  # noqa: S606 - argv has no text from users


if __name__ == "__main__":
    sys.exit(main())
