"""A host worker's settings, from the environment and nowhere else. No database, no secret key."""

from __future__ import annotations

import json
import os
import pwd
import re
import socket
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, NamedTuple, cast

from contracts.fields import HOST_NAME_PATTERN
from workers.host.address import LOOPBACK, address_towards
from workers.host.facts.gpus import Gpus
from workers.rank_environment import DEFAULT_GROUP_TIMEOUT_S

CHECKOUT = Path(__file__).resolve().parents[2]


class SettingError(RuntimeError):
    """A MESHBOARD_ variable is missing or senseless."""


class JobUser(NamedTuple):
    """Who torchrun and the ranks run as; the machine need not know the ids by a name."""

    name: str
    uid: int
    gid: int


# systemd's table of ids gives 65,520 to 65,533 to nobody (https://systemd.io/UIDS-GIDS).
NOBODYS_ID = 65_530
CHOSEN_USER = JobUser("meshboard-job", NOBODYS_ID, NOBODYS_ID)
# Each owner of jobs has an id from here on: 65,536 to 524,287 are nobody's in the same table.
OWNERS = CHOSEN_USER._replace(uid=65_536)
MOST_OWNERS = 524_288 - OWNERS.uid
Sandbox = Literal["auto", "bwrap", "off"]


@dataclass(frozen=True)
class HostSettings:
    """What a host worker knows of itself."""

    redis_url: str
    name: str
    slots: int
    device: Literal["cpu", "cuda"]
    run_dir: Path
    data_root: Path
    checkpoint_root: Path
    script_root: Path
    trainer_module: str
    log_bytes: int = 64 * 2**20  # of each log file of a rank, on disk
    stream_bytes: int = 32 * 2**20  # of an attempt's telemetry in Redis
    keep_runs_s: float = 7 * 86400.0  # how long an acknowledged attempt stays on disk
    keep_runs_bytes: int = 10 * 2**30  # of all acknowledged attempts
    job_user: JobUser | None = None  # None: as ourselves
    choose_user: bool = False  # OWNERS or CHOSEN_USER, where that works
    sandbox: Sandbox = "off"
    state_dir: Path = Path("var")  # of web and controller, where they share this machine
    group_timeout_s: int = DEFAULT_GROUP_TIMEOUT_S  # how long a job's ranks wait for each other
    address: str = LOOPBACK  # where the other hosts of a gang reach this one
    signing_key: bytes = b""  # of what it tells the controller
    saves_on_term: bool = False  # SIGTERM from outside has a run save, and ends no process of it


def host_settings(*, joined: bool = True) -> HostSettings:
    """Read the environment. What only a host has that has joined is empty where it may be.

    Raises:
        SettingError: naming the variable.
    """
    state = _state()
    redis_url = given("MESHBOARD_REDIS_URL")
    signing_key = _key(given("MESHBOARD_HOST_KEY"))
    if joined and not (redis_url and signing_key):
        missing = "MESHBOARD_HOST_KEY" if redis_url else "MESHBOARD_REDIS_URL"
        raise SettingError(f"{missing} is not set. Start the host worker with python -m workers.host.join.")
    device, gpus = _device()
    slots = _whole("MESHBOARD_SLOTS", gpus or max(4, os.cpu_count() or 1), 1)
    if device == "cuda":
        _are_seen(slots)
    sandbox = given("MESHBOARD_SANDBOX", "auto")
    if sandbox not in ("auto", "bwrap", "off"):
        raise SettingError(f"MESHBOARD_SANDBOX is {sandbox[:40]!r}. Use auto, bwrap, or off.")
    job_user = given("MESHBOARD_JOB_USER", "auto")
    return HostSettings(
        redis_url=redis_url,
        name=_host_name(given("MESHBOARD_HOST_NAME") or _joined_as(state) or socket.gethostname().split(".")[0]),
        slots=slots,
        device=device,
        run_dir=_folder("MESHBOARD_RUN_DIR", state / "runs"),
        data_root=_folder("MESHBOARD_DATA_ROOT", state / "data"),
        checkpoint_root=_folder("MESHBOARD_CHECKPOINT_ROOT", state / "checkpoints"),
        script_root=_folder("MESHBOARD_SCRIPT_ROOT", state / "scripts"),
        # Fault tests train a script of their own, one that ignores signals, say.
        trainer_module=given("MESHBOARD_TRAINER_MODULE", "workers.trainer"),
        log_bytes=_whole("MESHBOARD_LOG_BYTES", 64 * 2**20, 2**20),
        stream_bytes=_whole("MESHBOARD_STREAM_BYTES", 32 * 2**20, 2**20),
        keep_runs_s=_whole("MESHBOARD_KEEP_RUNS_DAYS", 7, 0) * 86400.0,
        keep_runs_bytes=_whole("MESHBOARD_KEEP_RUNS_BYTES", 10 * 2**30, 0),
        job_user=_job_user(job_user),
        choose_user=job_user == "auto" and os.geteuid() == 0,
        sandbox=cast(Sandbox, sandbox),
        state_dir=state,
        group_timeout_s=_whole("MESHBOARD_GROUP_TIMEOUT_S", DEFAULT_GROUP_TIMEOUT_S, 1),
        address=_address(given("MESHBOARD_ADDRESS"), redis_url),
        signing_key=signing_key,
    )


def given(variable: str, default: str = "") -> str:
    """What is set to nothing is not set: a line `NAME=` of a file of settings names no folder and no user."""
    return os.environ.get(variable) or default


def is_on(variable: str) -> bool:
    """Raises SettingError: it is neither 1 nor 0."""
    told = given(variable, "0")
    if told not in ("0", "1"):
        raise SettingError(f"{variable} is {told[:40]!r}. Use 1 or 0.")
    return told == "1"


def _state() -> Path:
    """In a checkout `var` there, else where a user's programs keep theirs: the same from wherever it is started."""
    own = CHECKOUT / "var" if (CHECKOUT / "manage.py").exists() else _users_state() / "meshboard"
    return _folder("MESHBOARD_STATE_DIR", own)


def _users_state() -> Path:
    return Path(given("XDG_STATE_HOME") or Path.home() / ".local" / "state")


def _folder(variable: str, default: Path) -> Path:
    return Path(given(variable) or default).expanduser().resolve()


def _device() -> tuple[Literal["cpu", "cuda"], int]:
    """What a slot is, and how many GPUs there are for that."""
    told = given("MESHBOARD_DEVICE")
    if told not in ("", "cpu", "cuda"):
        raise SettingError(f"MESHBOARD_DEVICE is {told[:40]!r}. Use cpu or cuda.")
    is_known = told == "cpu" or bool(told and given("MESHBOARD_SLOTS"))
    gpus = 0 if is_known else len(Gpus())
    if told == "cuda" and not (is_known or gpus):
        raise SettingError(
            "MESHBOARD_DEVICE is cuda, but the driver reports no GPU. Check nvidia-smi, or set MESHBOARD_SLOTS."
        )
    return ("cuda", gpus) if told == "cuda" or gpus else ("cpu", 0)


def _are_seen(slots: int) -> None:
    """Slots are the machine's first GPUs by their bus, whatever CUDA is told to see: a job would run on hidden ones."""
    told = given("CUDA_VISIBLE_DEVICES")
    if told and told.replace(" ", "").split(",")[:slots] != [str(slot) for slot in range(slots)]:
        raise SettingError(
            f"CUDA_VISIBLE_DEVICES is {told[:100]!r}, but jobs use GPUs 0 to {slots - 1} in bus order. "
            "Unset CUDA_VISIBLE_DEVICES, or set MESHBOARD_SLOTS to N to use only the first N GPUs."
        )


def _address(told: str, redis_url: str) -> str:
    """What was set, else our end of the way to Redis."""
    if not told:
        return address_towards(redis_url)
    try:
        return str(ip_address(told))
    except ValueError:
        raise SettingError(f"MESHBOARD_ADDRESS is {told[:40]!r}. Use an IP address of this host.") from None


def _joined_as(state: Path) -> str:
    """The one name that this machine has joined under, or else has asked to; empty where there is none, or several."""
    asked = list((state / "hosts").glob("*.json"))
    names = [file.stem for file in [file for file in asked if _has_joined(file)] or asked]
    return names[0] if len(names) == 1 else ""


def _has_joined(file: Path) -> bool:
    """`workers.host.joined` writes it, and says what is wrong with one that is broken."""
    try:
        return bool(json.loads(file.read_text())["key"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _host_name(name: str) -> str:
    if not re.fullmatch(HOST_NAME_PATTERN, name):
        raise SettingError(
            f"MESHBOARD_HOST_NAME is {name!r}. Use 1 to 100 characters from A-Z a-z 0-9 _ . -, but not . or - first."
        )
    return name


def _key(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise SettingError("MESHBOARD_HOST_KEY is not hexadecimal.") from None


def _whole(variable: str, default: int, least: int) -> int:
    text = given(variable, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 18 or int(text) < least:
        raise SettingError(f"{variable} is {text[:40]!r}. Use a whole number of at least {least}.")
    return int(text)


def _job_user(told: str) -> JobUser | None:
    """A user's name, UID:GID or `owners`; None for `none` and for `auto`, which is decided by trying."""
    if told in ("auto", "none"):
        return None
    user = OWNERS if told == "owners" else _by_ids(told) if ":" in told else _by_name(told)
    if user.uid == 0:
        raise SettingError(f"MESHBOARD_JOB_USER is {told!r}, which is root. Use another user.")
    if os.geteuid() != 0:
        raise SettingError(f"MESHBOARD_JOB_USER is {told!r}, but only a worker that runs as root can change the user.")
    return user


def _by_ids(told: str) -> JobUser:
    uid, _, gid = told.partition(":")
    if not all(text.isascii() and text.isdigit() and len(text) < 11 and int(text) < 2**32 - 1 for text in (uid, gid)):
        raise SettingError(f"MESHBOARD_JOB_USER is {told[:40]!r}. Use owners, a user name, or UID:GID.")
    return JobUser(CHOSEN_USER.name, int(uid), int(gid))


def _by_name(name: str) -> JobUser:
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        raise SettingError(f"MESHBOARD_JOB_USER is {name!r}, but this machine has no such user.") from None
    return JobUser(name, found.pw_uid, found.pw_gid)
