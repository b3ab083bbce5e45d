"""A machine becomes a host and works as one: `python -m workers.host.join URL --token TOKEN`.

The token is needed once. What the board answers is kept in a 0600 file below the state directory; with it the host
comes back whenever it is started again, and also while the board is away. Everything else is set by the environment
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
from workers.host.facts import machine
from workers.host.facts.gpus import Gpus
from workers.host.joined import Kept, kept_file, read_or_make, write
from workers.host.reporter import boot_id, device
from workers.host.settings import HostSettings, SettingError, host_settings, is_on
from workers.host.worklog import log_format, write_json

log = logging.getLogger(__name__)

TOKEN = "MESHBOARD_JOIN_TOKEN"  # noqa: S105 - the variable that holds it
TIMEOUT_S = 20.0
PATIENCE_S = 10.0  # for the board, of a host that has joined before
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
LOOPBACK = ("localhost", "127.0.0.1", "::1")
ANSWER_BYTES = 64 * 2**10


class RefusedError(Exception):
    """The board's word, which asking again will not change."""


class AwayError(Exception):
    """No answer, or one to wait after."""


def main() -> int:
    options = _options(sys.argv[1:])
    try:
        if log_format() == "json":
            write_json()
        else:
            logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        url = _board(options.url, options.insecure or is_on("MESHBOARD_JOIN_INSECURE"))
        settings = _settings(options)
        token = options.token or read_secret_file(TOKEN) or os.environ.get(TOKEN, "")
        kept = _join(url, settings, token)
    except (SettingError, SecretError, RefusedError) as error:
        print(f"meshboard: {error}", file=sys.stderr)
        return 1
    return _work(settings, kept)


def worker_command(name: str) -> list[str]:
    """argv of the Celery worker: it speaks to nobody but its queue. Its banner is no line of a log."""
    # Only root can run jobs as other users, so Celery's warning about root is wrong here.
    no_warning = "ignore:You're running the worker with superuser privileges"
    banner = ["--quiet"] if log_format() == "json" else []
    celery = [sys.executable, "-W", no_warning, "-m", "celery", *banner]
    quiet = ["--without-mingle", "--without-gossip", "--without-heartbeat"]
    options = ["--pool", "threads", "--concurrency", "2", *quiet, "--loglevel", "INFO"]
    named = ["--queues", host_queue(name), "--hostname", f"host-{name}@%h"]
    return [*celery, "-A", "workers.host.app", "worker", *options, *named]


def _options(argv: list[str]) -> argparse.Namespace:
    env = os.environ
    parser = argparse.ArgumentParser(prog="python -m workers.host.join", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "url", nargs="?", default=env.get("MESHBOARD_URL", ""), help="address of the board (default: MESHBOARD_URL)"
    )
    parser.add_argument(
        "--token",
        help=f"join token, visible in the process list (default: {TOKEN}, or the file in {TOKEN}_FILE)",
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


def _board(url: str, insecure: bool) -> str:
    """The board's address. Raises SettingError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingError(f"The address of the board is {url[:100]!r}. Use https://HOST.")
    if parts.scheme == "http" and parts.hostname not in LOOPBACK and not insecure:
        raise SettingError(
            f"{url[:100]} would send the token and the host key unencrypted. Use https://, or --insecure."
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def _settings(options: argparse.Namespace) -> HostSettings:
    """What was asked for on the command line wins, and the worker gets it by the environment. Raises SettingError."""
    env = os.environ
    if options.slots is not None:
        env["MESHBOARD_SLOTS"] = options.slots
    if options.name is not None:
        env["MESHBOARD_HOST_NAME"] = options.name
    settings = host_settings(joined=False)
    env |= {"MESHBOARD_HOST_NAME": settings.name, "MESHBOARD_DEVICE": settings.device}
    env["MESHBOARD_SLOTS"] = str(settings.slots)
    return settings


def _join(url: str, settings: HostSettings, token: str) -> Kept:
    """What the host works with. Raises SettingError, RefusedError."""
    path = kept_file(settings.state_dir, settings.name)
    kept = read_or_make(path)
    request = _request(settings, kept.identity, token)
    began, pause_s, told = time.monotonic(), FIRST_PAUSE_S, ""
    while True:
        try:
            joined = _ask(url, request)
        except AwayError as error:
            if kept.key and time.monotonic() - began > PATIENCE_S:
                log.warning("%s: continuing with the settings stored in %s", error, path)
                return kept
            if str(error) != told:
                told = str(error)
                log.info("%s: retrying", told)
            time.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, pause_s * 2)
            continue
        kept = Kept(kept.identity, joined["redis_url"], joined["key"])
        write(path, kept)
        log.info("joined %s as %s", url, joined["name"])
        return kept


def _request(settings: HostSettings, identity: str, token: str) -> JoinRequest:
    name, memory_bytes = device(settings)
    request = JoinRequest(
        name=settings.name,
        identity=identity,
        slots=settings.slots,
        device=settings.device,
        device_name=name,
        memory_bytes=memory_bytes,
        boot_id=boot_id(),
        facts=machine.facts(Gpus(), []),
    )
    if token:
        request["token"] = token
    return request


def _ask(url: str, request: JoinRequest) -> JoinResponse:
    """Raises AwayError, RefusedError."""
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(url + JOIN_PATH, json.dumps(request).encode(), headers)  # noqa: S310 - `_board` looked
    opener = urllib.request.build_opener(_NoRedirect)
    try:
        with opener.open(asked, timeout=TIMEOUT_S) as answer:
            told: JoinResponse = json.loads(answer.read(ANSWER_BYTES))
            return JoinResponse(name=told["name"], redis_url=told["redis_url"], key=told["key"])
    except urllib.error.HTTPError as error:
        words = _words(error)
        if error.code in (429, 502, 503, 504):
            raise AwayError(f"{url} returned HTTP {error.code}: {words}") from None
        raise RefusedError(f"{url} returned HTTP {error.code}: {words}") from None
    except (ssl.SSLCertVerificationError, ssl.CertificateError) as error:
        raise RefusedError(f"The certificate of {url} is invalid: {error}") from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            raise RefusedError(
                f"The certificate of {url} is invalid: {error.reason}. Set SSL_CERT_FILE to its CA certificates."
            ) from None
        raise AwayError(f"Cannot reach {url}: {error.reason}") from None
    except (OSError, HTTPException) as error:
        raise AwayError(f"Cannot reach {url}: {error}") from None
    except (ValueError, KeyError, TypeError):
        raise RefusedError(f"{url} is not a Meshboard board") from None


def _words(error: urllib.error.HTTPError) -> str:
    """The board's own, where it was the board that answered."""
    location = error.headers.get("Location")
    if location is not None:
        return f"it is at {location[:200]}"
    try:
        told: Any = json.loads(error.read(ANSWER_BYTES))
        return "; ".join(f"{one['field']}: {one['message']}" for one in told["errors"])[:1000]
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        return str(error.reason)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A token goes nowhere that nobody named."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _work(settings: HostSettings, kept: Kept) -> NoReturn:
    """Become the worker."""
    environment = {k: v for k, v in os.environ.items() if k not in (TOKEN, f"{TOKEN}_FILE")}
    environment |= {"MESHBOARD_REDIS_URL": kept.redis_url, "MESHBOARD_HOST_KEY": kept.key}
    argv = worker_command(settings.name)
    sys.stdout.flush()
    os.execve(argv[0], argv, environment)  # noqa: S606 - our own argv, no shell


if __name__ == "__main__":
    sys.exit(main())
