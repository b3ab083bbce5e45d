"""Settings of a host worker, from environment variables, and the credentials it got when it joined the board."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import logging.config
import os
import pwd
import re
import secrets
import socket
import stat
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

from contracts.fields import HOST_NAME_PATTERN
from contracts.logs import LogFormat, LogLevel, build_json_formatter
from workers.host.hardware import LOOPBACK, Gpus, get_address_towards
from workers.rank_environment import DEFAULT_GROUP_TIMEOUT_S

CHECKOUT = Path(__file__).resolve().parents[2]
LOG_FORMAT_VARIABLE = "MESHBOARD_LOG_FORMAT"
LOG_LEVEL_VARIABLE = "MESHBOARD_LOG_LEVEL"
TEXT_LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"
BOARD_URL_VARIABLE = "MESHBOARD_URL"
# systemd does not assign the IDs 65,520 to 65,533 (https://systemd.io/UIDS-GIDS).
DEFAULT_JOB_USER_ID = 65_530
REPLICA_MARK = "%n"  # in MESHBOARD_HOST_NAME: the number of the replica
Sandbox = Literal["auto", "bwrap", "off"]
GroupUse = Literal["auto", "required", "off"]


class HostSettingError(RuntimeError):
    """A MESHBOARD_ variable, or the credentials file, is missing or invalid."""


class JobUser(NamedTuple):
    """The user of torchrun and the ranks. The machine does not need a name for the IDs."""

    name: str
    uid: int
    gid: int


class Replica(NamedTuple):
    """A host worker of several that share a state directory, with an own name and run directory."""

    name: str
    run_dir: Path


DEFAULT_JOB_USER = JobUser("meshboard-job", DEFAULT_JOB_USER_ID, DEFAULT_JOB_USER_ID)
# Each owner of jobs gets an ID in this range. systemd does not assign 65,536 to 524,287 either.
USER_PER_OWNER = DEFAULT_JOB_USER._replace(uid=65_536)
MAX_OWNERS = 524_288 - USER_PER_OWNER.uid


@dataclass(frozen=True)
class HostSettings:
    """Settings of a host worker and of the supervisors that it starts."""

    redis_url: str
    name: str
    slots: int
    device: Literal["cpu", "cuda"]
    run_dir: Path
    data_root: Path
    checkpoint_root: Path
    script_root: Path
    trainer_module: str
    log_bytes: int = 64 * 2**20  # per log file of a rank, on disk
    stream_bytes: int = 32 * 2**20  # per attempt, of telemetry in Redis
    keep_runs_s: float = 7 * 86400.0  # per acknowledged attempt
    keep_runs_bytes: int = 10 * 2**30  # of all acknowledged attempts
    min_free_bytes: int = 64 * 2**20  # on the disk of the run directory, to start a job
    shared_gpu_bytes: int = 2**30  # of a GPU, that another program may use when a job starts
    builds_upload_environments: bool = False  # from the package list of an upload
    job_disk_bytes: int = 0  # of all files of a job on this host; 0: no limit
    job_memory_bytes: int = 0  # of all processes of a job on this host; 0: no limit
    job_cpus: int = 0  # of all processes of a job on this host; 0: no limit
    job_processes: int = 0  # and threads; 0: no limit
    job_open_files: int = 0  # per process; 0: the limit of the host worker
    control_groups: GroupUse = "auto"
    job_user: JobUser | None = None  # None: the user of the host worker
    choose_user: bool = False  # use USER_PER_OWNER or DEFAULT_JOB_USER if it works
    sandbox: Sandbox = "off"
    allow_root_jobs: bool = False  # also if the worker runs as root and no other user works
    state_dir: Path = Path("var")  # of the web and controller processes, if they share this machine
    group_timeout_s: int = DEFAULT_GROUP_TIMEOUT_S  # of a process group
    address: str = LOOPBACK  # for the other hosts of a multi-host job
    signing_key: bytes = b""  # of messages to the controller
    board_url: str = ""  # of the REST API, empty if the worker was started without it
    saves_on_term: bool = False  # on SIGTERM from outside, a run saves a checkpoint before it ends


class HostCredentials(NamedTuple):
    """Credentials of a host. `redis_url` and `key` are empty until the board accepts the host."""

    identity: str
    redis_url: str = ""
    key: str = ""


def read_host_settings(*, joined: bool = True) -> HostSettings:
    """Read the environment. With `joined=False`, the credentials can be missing. Raises HostSettingError."""
    state = _read_state_dir()
    redis_url = get_variable("MESHBOARD_REDIS_URL")
    signing_key = _parse_key(get_variable("MESHBOARD_HOST_KEY"))
    if joined and not (redis_url and signing_key):
        missing = "MESHBOARD_HOST_KEY" if redis_url else "MESHBOARD_REDIS_URL"
        raise HostSettingError(f"{missing} is not set. Start the host worker with python -m workers.host.join.")
    device, num_gpus = _read_device()
    slots = _read_whole("MESHBOARD_SLOTS", num_gpus or max(4, os.cpu_count() or 1), 1)
    if device == "cuda":
        _check_visible_devices(slots)
    sandbox = get_variable("MESHBOARD_SANDBOX", "auto")
    if sandbox not in ("auto", "bwrap", "off"):
        raise HostSettingError(f"MESHBOARD_SANDBOX is {sandbox[:40]!r}. Use auto, bwrap, or off.")
    control_groups = get_variable("MESHBOARD_CONTROL_GROUPS", "auto")
    if control_groups not in get_args(GroupUse):
        raise HostSettingError(f"MESHBOARD_CONTROL_GROUPS is {control_groups[:40]!r}. Use auto, required, or off.")
    job_user = get_variable("MESHBOARD_JOB_USER", "auto")
    name = get_variable("MESHBOARD_HOST_NAME") or _find_joined_name(state) or socket.gethostname().split(".")[0]
    run_dir = read_run_dir(state)
    if REPLICA_MARK in name:
        name, run_dir = _find_own_replica(name, run_dir)
    return HostSettings(
        redis_url=redis_url,
        name=_check_host_name(name),
        slots=slots,
        device=device,
        run_dir=run_dir,
        data_root=_read_folder("MESHBOARD_DATA_ROOT", state / "data"),
        checkpoint_root=_read_folder("MESHBOARD_CHECKPOINT_ROOT", state / "checkpoints"),
        script_root=_read_folder("MESHBOARD_SCRIPT_ROOT", state / "scripts"),
        # Fault tests use their own trainer, for example one that ignores signals.
        trainer_module=get_variable("MESHBOARD_TRAINER_MODULE", "workers.trainer"),
        log_bytes=_read_whole("MESHBOARD_LOG_BYTES", 64 * 2**20, 2**20),
        stream_bytes=_read_whole("MESHBOARD_STREAM_BYTES", 32 * 2**20, 2**20),
        keep_runs_s=_read_whole("MESHBOARD_KEEP_RUNS_DAYS", 7, 0) * 86400.0,
        keep_runs_bytes=_read_whole("MESHBOARD_KEEP_RUNS_BYTES", 10 * 2**30, 0),
        min_free_bytes=_read_whole("MESHBOARD_MIN_FREE_BYTES", 64 * 2**20, 0),
        shared_gpu_bytes=_read_whole("MESHBOARD_SHARED_GPU_BYTES", 2**30, 1),
        builds_upload_environments=is_enabled("MESHBOARD_UPLOAD_ENVIRONMENTS"),
        job_disk_bytes=_read_whole("MESHBOARD_JOB_DISK_BYTES", 0, 0),
        job_memory_bytes=_read_whole("MESHBOARD_JOB_MEMORY_BYTES", 0, 0),
        job_cpus=_read_whole("MESHBOARD_JOB_CPUS", 0, 0),
        job_processes=_read_whole("MESHBOARD_JOB_PROCESSES", 10_000, 0),
        job_open_files=_read_whole("MESHBOARD_JOB_OPEN_FILES", 65_536, 0),
        control_groups=cast(GroupUse, control_groups),
        job_user=_parse_job_user(job_user),
        choose_user=job_user == "auto" and os.geteuid() == 0,
        sandbox=cast(Sandbox, sandbox),
        allow_root_jobs=is_enabled("MESHBOARD_ALLOW_ROOT_JOBS"),
        state_dir=state,
        group_timeout_s=_read_whole("MESHBOARD_GROUP_TIMEOUT_S", DEFAULT_GROUP_TIMEOUT_S, 1),
        address=_read_address(redis_url),
        signing_key=signing_key,
        board_url=get_variable(BOARD_URL_VARIABLE),
    )


def get_variable(variable: str, default: str = "") -> str:
    """Return a variable. An empty variable counts as not set, because a settings file can contain `NAME=`."""
    return os.environ.get(variable) or default


def is_enabled(variable: str) -> bool:
    """Return whether a variable is 1. Raises HostSettingError if it is neither 1 nor 0."""
    value = get_variable(variable, "0")
    if value not in ("0", "1"):
        raise HostSettingError(f"{variable} is {value[:40]!r}. Use 1 or 0.")
    return value == "1"


def read_run_dir(state: Path) -> Path:
    """Return the run directory, which is that of the first replica if there are several."""
    return _read_folder("MESHBOARD_RUN_DIR", state / "runs")


def get_replica(name: str, first_run_dir: Path, number: int) -> Replica:
    """Return the replica with a number, from a name with REPLICA_MARK and the run directory of the first replica."""
    run_dir = first_run_dir if number == 1 else first_run_dir.with_name(f"{first_run_dir.name}-{number}")
    return Replica(name.replace(REPLICA_MARK, str(number)), run_dir)


def get_worker_file(run_dir: Path) -> Path:
    """Return the file that names the worker that last locked a run directory."""
    return run_dir / "worker.json"


def get_credentials_file(state_dir: Path, name: str) -> Path:
    return state_dir / "hosts" / f"{name}.json"


def load_or_create_credentials(path: Path) -> HostCredentials:
    """Read the credentials, or create an identity and store it.

    The identity is stored before it is sent, so a host that lost the board's response can ask again.
    Raises HostSettingError.
    """
    try:
        mode = path.stat().st_mode
        content = json.loads(path.read_text())
        credentials = HostCredentials(**{name: str(content[name]) for name in HostCredentials._fields})
    except FileNotFoundError:
        credentials = HostCredentials(secrets.token_urlsafe(32))
        save_credentials(path, credentials)
        return credentials
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HostSettingError(f"Cannot read {path}: {error}. Remove it, and join again with a token.") from None
    if stat.S_IMODE(mode) & 0o077:
        raise HostSettingError(
            f"Other users can read {path} (mode {stat.S_IMODE(mode):03o}). Run chmod 600 on it, or join again."
        )
    return credentials


def save_credentials(path: Path, credentials: HostCredentials) -> None:
    """Write the credentials by renaming a complete file. Raises HostSettingError."""
    draft = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            json.dump(credentials._asdict(), out)
        draft.replace(path)
    except OSError as error:
        raise HostSettingError(f"Cannot write {path}: {error}. Check MESHBOARD_STATE_DIR.") from None


def get_log_format() -> LogFormat:
    """Return the format of the host worker's log. Raises HostSettingError."""
    value = get_variable(LOG_FORMAT_VARIABLE, "text")
    if value not in ("text", "json"):
        raise HostSettingError(f"{LOG_FORMAT_VARIABLE} is {value[:40]!r}. Use text or json.")
    return cast(LogFormat, value)


def get_log_level() -> str:
    """Return the lowest level of the host worker's log lines, as `logging` names it. Raises HostSettingError."""
    value = get_variable(LOG_LEVEL_VARIABLE, "info")
    if value not in get_args(LogLevel):
        raise HostSettingError(f"{LOG_LEVEL_VARIABLE} is {value[:40]!r}. Use debug, info, warning, or error.")
    return value.upper()


def set_up_json_logs(*, fields: dict[str, Any] | None = None, **_named: object) -> None:
    """Write the lines of all loggers and Python's warnings as JSON to standard error.

    Args:
        fields: Fields with the same value in each line.
    """
    logging.captureWarnings(True)
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"json": build_json_formatter(static=fields)},
            "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "json"}},
            "root": {"handlers": ["console"], "level": get_log_level()},
        }
    )


def _read_state_dir() -> Path:
    """Return `var` in a checkout, or else the user's state folder. Independent of the working directory."""
    user_state = Path(get_variable("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    default = CHECKOUT / "var" if (CHECKOUT / "manage.py").exists() else user_state / "meshboard"
    return _read_folder("MESHBOARD_STATE_DIR", default)


def _read_folder(variable: str, default: Path) -> Path:
    return Path(get_variable(variable) or default).expanduser().resolve()


def _read_device() -> tuple[Literal["cpu", "cuda"], int]:
    """Return the device of a slot, and the number of GPUs. Without a setting, the device is cuda if there are GPUs."""
    device = get_variable("MESHBOARD_DEVICE")
    if device not in ("", "cpu", "cuda"):
        raise HostSettingError(f"MESHBOARD_DEVICE is {device[:40]!r}. Use cpu or cuda.")
    if device == "cpu":
        return "cpu", 0
    if device and get_variable("MESHBOARD_SLOTS"):  # no need to ask the driver
        return "cuda", 0
    num_gpus = len(Gpus())
    if device == "cuda" and not num_gpus:
        raise HostSettingError(
            "MESHBOARD_DEVICE is cuda, but the driver reports no GPU. Check nvidia-smi, or set MESHBOARD_SLOTS."
        )
    return ("cuda", num_gpus) if num_gpus else ("cpu", 0)


def _check_visible_devices(slots: int) -> None:
    """Reject a CUDA_VISIBLE_DEVICES that hides GPUs. Slots are the first GPUs in bus order, so jobs would use them."""
    visible = get_variable("CUDA_VISIBLE_DEVICES")
    if visible and visible.replace(" ", "").split(",")[:slots] != [str(slot) for slot in range(slots)]:
        raise HostSettingError(
            f"CUDA_VISIBLE_DEVICES is {visible[:100]!r}, but jobs use GPUs 0 to {slots - 1} in bus order. "
            "Unset CUDA_VISIBLE_DEVICES, or set MESHBOARD_SLOTS to N to use only the first N GPUs."
        )


def _read_address(redis_url: str) -> str:
    """Return the address for other hosts. It defaults to the address that this host uses to reach Redis."""
    address = get_variable("MESHBOARD_ADDRESS")
    if not address:
        return get_address_towards(redis_url)
    try:
        return str(ip_address(address))
    except ValueError:
        raise HostSettingError(f"MESHBOARD_ADDRESS is {address[:40]!r}. Use an IP address of this host.") from None


def _find_own_replica(name: str, first_run_dir: Path) -> Replica:
    """Return the replica whose worker last ran on this machine, or the first replica."""
    for number in itertools.count(1):
        replica = get_replica(name, first_run_dir, number)
        try:
            if json.loads(get_worker_file(replica.run_dir).read_text())["machine"] == socket.gethostname():
                return replica
        except (OSError, ValueError, KeyError, TypeError):
            break
    return get_replica(name, first_run_dir, 1)


def _find_joined_name(state: Path) -> str:
    """Return the only name that this machine has joined as, or else asked to join as. Empty if there are several."""
    files = list((state / "hosts").glob("*.json"))
    joined = []
    for file in files:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if json.loads(file.read_text())["key"]:
                joined.append(file)
    names = [file.stem for file in joined or files]
    return names[0] if len(names) == 1 else ""


def _check_host_name(name: str) -> str:
    if not re.fullmatch(HOST_NAME_PATTERN, name):
        raise HostSettingError(
            f"MESHBOARD_HOST_NAME is {name!r}. Use 1 to 100 characters from A-Z a-z 0-9 _ . -, but not . or - first."
        )
    return name


def _parse_key(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise HostSettingError("MESHBOARD_HOST_KEY is not hexadecimal.") from None


def _read_whole(variable: str, default: int, minimum: int) -> int:
    text = get_variable(variable, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 18 or int(text) < minimum:
        raise HostSettingError(f"{variable} is {text[:40]!r}. Use a whole number of at least {minimum}.")
    return int(text)


def _parse_job_user(text: str) -> JobUser | None:
    """Parse a user name, UID:GID, or `owners`. Return None for `none`, and for `auto`, which is tried later."""
    if text in ("auto", "none"):
        return None
    user = USER_PER_OWNER if text == "owners" else _parse_ids(text) if ":" in text else _find_user(text)
    if user.uid == 0:
        raise HostSettingError(f"MESHBOARD_JOB_USER is {text!r}, which is root. Use another user.")
    if os.geteuid() != 0:
        raise HostSettingError(
            f"MESHBOARD_JOB_USER is {text!r}, but only a worker that runs as root can change the user."
        )
    return user


def _parse_ids(text: str) -> JobUser:
    uid, _, gid = text.partition(":")
    if not all(part.isascii() and part.isdigit() and len(part) < 11 and int(part) < 2**32 - 1 for part in (uid, gid)):
        raise HostSettingError(f"MESHBOARD_JOB_USER is {text[:40]!r}. Use owners, a user name, or UID:GID.")
    return JobUser(DEFAULT_JOB_USER.name, int(uid), int(gid))


def _find_user(name: str) -> JobUser:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise HostSettingError(f"MESHBOARD_JOB_USER is {name!r}, but this machine has no such user.") from None
    return JobUser(name, entry.pw_uid, entry.pw_gid)
