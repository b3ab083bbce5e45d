"""Report what is wrong with this host, and what to do: `python -m workers.host.doctor`, with the worker's settings."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import redis

from contracts.doctor import (
    Finding,
    check_clock,
    check_disk,
    check_host_name,
    format_findings,
    format_findings_as_json,
    get_exit_code,
)
from contracts.names import host_queue
from workers.host.hardware import Gpus, get_address_towards, open_listener
from workers.host.isolation import choose_isolation
from workers.host.machine import measure_clock_offset
from workers.host.programs import find_jemalloc
from workers.host.settings import (
    HostSettingError,
    HostSettings,
    get_credentials_file,
    get_variable,
    load_or_create_credentials,
    read_host_settings,
)

TIMEOUT_S = 3.0
TORCH_TIMEOUT_S = 120.0
TORCH_SCRIPT = (
    "import torch, torch.distributed as d;"
    "print(torch.__version__, torch.cuda.device_count(), d.is_gloo_available(), d.is_nccl_available())"
)


def check_host() -> Iterator[Finding]:
    """Yield all findings. Fix them in this order."""
    try:
        settings = read_host_settings(joined=False)
    except HostSettingError as error:
        yield Finding("fail", "settings", str(error), "see docs/reference/host-settings.md")
        return
    unless = "" if get_variable("MESHBOARD_SLOTS") else ", unless the worker was started with --slots"
    yield Finding("ok", "settings", f"{settings.name}: {settings.slots} slots of {settings.device}{unless}")
    redis_url = yield from _check_joined(settings)
    if redis_url:
        yield from _check_redis(redis_url, settings.name)
        yield from _check_ports(settings, redis_url)
    if url := os.environ.get("MESHBOARD_URL"):
        yield _check_board(url)
    yield check_host_name()
    yield from _check_disks(settings)
    yield _check_isolation(settings)
    yield from _check_gpus(settings)
    if settings.device == "cpu":
        yield _check_heap()
    yield _check_torch(settings)
    yield Finding("ok", "versions", f"Python {platform.python_version()}, on {platform.platform()}")


def _check_joined(settings: HostSettings) -> Generator[Finding, None, str]:
    """Yield findings, and return the URL of Redis, which is empty if it is unknown."""
    path = get_credentials_file(settings.state_dir, settings.name)
    advice = "run python -m workers.host.join URL with a join token"
    if not path.exists():
        yield Finding("fail", "joined", f"this machine has not joined as {settings.name}: no {path}", advice)
        return settings.redis_url
    try:
        credentials = load_or_create_credentials(path)
    except HostSettingError as error:
        yield Finding("fail", "joined", str(error), advice)
        return settings.redis_url
    if not credentials.key:
        yield Finding("fail", "joined", f"{path} exists, but the board has not answered", advice)
        return settings.redis_url
    yield Finding("ok", "joined", f"joined as {settings.name}, stored in {path}")
    return credentials.redis_url


def _check_redis(url: str, name: str) -> Iterator[Finding]:
    place = url.rpartition("@")[2]
    try:
        with redis.Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S) as client:
            client.ping()

            def get_time() -> float:
                response: Any = client.time()
                return float(response[0] + response[1] / 1e6)

            yield Finding("ok", "Redis", f"{place} answers; {client.llen(host_queue(name))} orders in the queue")
            offset_s, round_trip_s = measure_clock_offset(get_time)
            yield check_clock("Redis", offset_s, round_trip_s / 2)
    except redis.AuthenticationError as error:
        advice = "if the host was removed or Redis was emptied, join again with workers.host.join and a new token"
        yield Finding("fail", "Redis", f"{place} does not know this host: {error}", advice)
    except (redis.RedisError, OSError) as error:
        advice = "check firewalls, and the setting MESHBOARD_REDIS_FOR_HOSTS of the board"
        yield Finding("fail", "Redis", f"{place} does not answer: {error}", advice)


def _check_ports(settings: HostSettings, redis_url: str) -> Iterator[Finding]:
    address = settings.address if get_variable("MESHBOARD_ADDRESS") else get_address_towards(redis_url)
    try:
        with open_listener(address) as listener:
            port = listener.getsockname()[1]
    except OSError as error:
        advice = "set MESHBOARD_ADDRESS to an address of this machine that other hosts can reach"
        yield Finding("fail", "ports", f"cannot listen on {address}: {error}", advice)
        return
    place = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    yield Finding("ok", "ports", f"can listen on {place}; allow all ports between hosts in the firewall")


def _check_board(url: str) -> Finding:
    if not url.startswith(("http://", "https://")):
        return Finding("fail", "board", f"MESHBOARD_URL is {url[:100]!r}, which is not an address", "use https://HOST")
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/healthz", timeout=TIMEOUT_S):  # noqa: S310 - checked above
            return Finding("ok", "board", f"{url} is healthy")
    except urllib.error.HTTPError as error:
        advice = "run the doctor of the board (docs/howto/deploy.md)"
        return Finding("warn", "board", f"{url} returned HTTP {error.code}", advice)
    except (OSError, ValueError) as error:
        advice = "running jobs continue; a host needs the board to join"
        return Finding("warn", "board", f"{url} does not answer: {error}", advice)


def _check_disks(settings: HostSettings) -> Iterator[Finding]:
    for label, folder in (("runs", settings.run_dir), ("checkpoints", settings.checkpoint_root)):
        yield check_disk(label, folder)
        existing = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
        if not os.access(existing, os.W_OK):
            text = f"{label}, {folder}: the host worker has no write permission"
            yield Finding("fail", "disk", text, f"chown the folder to uid {os.geteuid()}, or set another folder")


def _check_isolation(settings: HostSettings) -> Finding:
    """Choose an isolation as the host worker does, in a temporary run directory."""
    try:
        with tempfile.TemporaryDirectory(prefix="meshboard-doctor-") as folder:
            chosen, note = choose_isolation(replace(settings, run_dir=Path(folder)))
    except HostSettingError as error:
        return Finding("fail", "isolation", str(error), "see docs/explanation/isolation.md")
    if note:
        install = "" if shutil.which("bwrap") else "apt-get install bubblewrap; "
        return Finding("warn", "isolation", note, f"{install}see docs/explanation/isolation.md")
    who = "the worker's own user" if chosen.job_user is None else f"uid {chosen.job_user.uid}"
    bubblewrap = "in bubblewrap" if chosen.sandbox == "bwrap" else "without bubblewrap"
    return Finding("ok", "isolation", f"jobs run as {who}, {bubblewrap}")


def _check_gpus(settings: HostSettings) -> Iterator[Finding]:
    gpus = Gpus()
    for number, gpu in enumerate(gpus.get_facts()):
        yield Finding("ok", "GPU", f"{number}: {gpu['model']}, {gpu['memory_bytes'] / 2**30:.0f} GiB, {gpu['uuid']}")
    if settings.device == "cuda" and len(gpus) < settings.slots:
        text = f"{settings.slots} slots, but the driver reports {len(gpus)} GPUs"
        yield Finding("fail", "GPU", text, "check nvidia-smi, or set MESHBOARD_SLOTS or MESHBOARD_DEVICE=cpu")
    if settings.device == "cpu" and len(gpus):
        text = f"{len(gpus)} GPUs, but the slots use the CPU"
        yield Finding("warn", "GPU", text, f"to use the GPUs, set MESHBOARD_DEVICE=cuda MESHBOARD_SLOTS={len(gpus)}")


def _check_heap() -> Finding:
    if library := find_jemalloc():
        return Finding("ok", "heap", f"ranks allocate tensors with {library}")
    text = "jemalloc is missing, so the memory of CPU ranks can be up to 50% larger"
    return Finding("warn", "heap", text, "apt-get install libjemalloc2, and restart the worker")


def _check_torch(settings: HostSettings) -> Finding:
    """Load torch in a separate process, as a rank does."""
    command, advice = [sys.executable, "-c", TORCH_SCRIPT], "pip install -c requirements.lock '.[worker]'"
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("fail", "torch", f"cannot be tested: {error}", advice)
    if result.returncode != 0:
        last_line = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
        return Finding("fail", "torch", f"does not load: {last_line[:300]}", advice)
    version, num_gpus, gloo, nccl = result.stdout.split()
    text = f"{version}, {num_gpus} GPUs, gloo {gloo}, NCCL {nccl}"
    if settings.device == "cuda" and (int(num_gpus) < settings.slots or nccl != "True"):
        return Finding("fail", "torch", text, "torch has no CUDA, or the driver is too old; check nvidia-smi")
    return Finding("ok", "torch", text)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.host.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    findings = list(check_host())
    print(format_findings_as_json(findings) if options.json else format_findings(findings))
    return get_exit_code(findings)


if __name__ == "__main__":
    sys.exit(main())
