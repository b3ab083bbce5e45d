"""What is wrong with this host, and what to do: `python -m workers.host.doctor`, with the worker's own settings."""

from __future__ import annotations

import argparse
import os
import platform
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
from workers.host.address import address_towards, listening
from workers.host.apart.isolation import isolated
from workers.host.facts.gpus import Gpus
from workers.host.facts.use import clock_offset
from workers.host.joined import kept_file, read_or_make
from workers.host.settings import HostSettings, SettingError, given, host_settings
from workers.host.start.heap import jemalloc

PATIENCE_S = 3.0
TORCH_S = 120.0
TORCH = (
    "import torch, torch.distributed as d;"
    "print(torch.__version__, torch.cuda.device_count(), d.is_gloo_available(), d.is_nccl_available())"
)


def findings() -> Iterator[Finding]:
    """Everything, in the order in which it is worth mending."""
    try:
        settings = host_settings(joined=False)
    except SettingError as error:
        yield Finding("fail", "settings", str(error), "see docs/reference/host-settings.md")
        return
    unless = "" if given("MESHBOARD_SLOTS") else ", unless the worker was started with --slots"
    yield Finding("ok", "settings", f"{settings.name}: {settings.slots} slots of {settings.device}{unless}")
    redis_url = yield from _joined(settings)
    if redis_url:
        yield from _redis(redis_url, settings.name)
        yield from _address(settings, redis_url)
    if url := os.environ.get("MESHBOARD_URL"):
        yield _board(url)
    yield check_host_name()
    yield from _folders(settings)
    yield _isolation(settings)
    yield from _gpus(settings)
    if settings.device == "cpu":
        yield _heap()
    yield _torch(settings)
    yield Finding("ok", "versions", f"Python {platform.python_version()}, on {platform.platform()}")


def _joined(settings: HostSettings) -> Generator[Finding, None, str]:
    """Returns the URL of Redis, empty where none is known."""
    path = kept_file(settings.state_dir, settings.name)
    advice = "run python -m workers.host.join URL with a join token"
    if not path.exists():
        yield Finding("fail", "joined", f"this machine has not joined as {settings.name}: no {path}", advice)
        return settings.redis_url
    try:
        kept = read_or_make(path)
    except SettingError as error:
        yield Finding("fail", "joined", str(error), advice)
        return settings.redis_url
    if not kept.key:
        yield Finding("fail", "joined", f"{path} exists, but the board has not answered", advice)
        return settings.redis_url
    yield Finding("ok", "joined", f"joined as {settings.name}, stored in {path}")
    return kept.redis_url


def _redis(url: str, name: str) -> Iterator[Finding]:
    place = url.rpartition("@")[2]
    try:
        with redis.Redis.from_url(url, socket_timeout=PATIENCE_S, socket_connect_timeout=PATIENCE_S) as client:
            client.ping()

            def now() -> float:
                asked: Any = client.time()
                return float(asked[0] + asked[1] / 1e6)

            yield Finding("ok", "Redis", f"{place} answers; {client.llen(host_queue(name))} orders in the queue")
            offset_s, took_s = clock_offset(now)
            yield check_clock("Redis", offset_s, took_s / 2)
    except redis.AuthenticationError as error:
        advice = "if the host was removed or Redis was emptied, join again with workers.host.join and a new token"
        yield Finding("fail", "Redis", f"{place} does not know this host: {error}", advice)
    except (redis.RedisError, OSError) as error:
        advice = "check firewalls, and the setting MESHBOARD_REDIS_FOR_HOSTS of the board"
        yield Finding("fail", "Redis", f"{place} does not answer: {error}", advice)


def _address(settings: HostSettings, redis_url: str) -> Iterator[Finding]:
    address = settings.address if given("MESHBOARD_ADDRESS") else address_towards(redis_url)
    try:
        with listening(address) as door:
            port = door.getsockname()[1]
    except OSError as error:
        advice = "set MESHBOARD_ADDRESS to an address of this machine that other hosts can reach"
        yield Finding("fail", "ports", f"cannot listen on {address}: {error}", advice)
        return
    place = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    yield Finding("ok", "ports", f"can listen on {place}; allow all ports between hosts in the firewall")


def _board(url: str) -> Finding:
    if not url.startswith(("http://", "https://")):
        return Finding("fail", "board", f"MESHBOARD_URL is {url[:100]!r}, which is not an address", "use https://HOST")
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/healthz", timeout=PATIENCE_S):  # noqa: S310 - looked at above
            return Finding("ok", "board", f"{url} is healthy")
    except urllib.error.HTTPError as error:
        advice = "run the doctor of the board (docs/howto/deploy.md)"
        return Finding("warn", "board", f"{url} returned HTTP {error.code}", advice)
    except (OSError, ValueError) as error:
        advice = "running jobs continue; a host needs the board to join"
        return Finding("warn", "board", f"{url} does not answer: {error}", advice)


def _folders(settings: HostSettings) -> Iterator[Finding]:
    named: list[tuple[str, Path]] = [("runs", settings.run_dir), ("checkpoints", settings.checkpoint_root)]
    for what, folder in named:
        yield check_disk(what, folder)
        there = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
        if not os.access(there, os.W_OK):
            words = f"{what}, {folder}: the host worker has no write permission"
            yield Finding("fail", "disk", words, f"chown the folder to uid {os.geteuid()}, or set another folder")


def _isolation(settings: HostSettings) -> Finding:
    """Tried as the worker does at its start, with a run directory of its own."""
    try:
        with tempfile.TemporaryDirectory(prefix="meshboard-doctor-") as folder:
            chosen, note = isolated(replace(settings, run_dir=Path(folder)))
    except SettingError as error:
        return Finding("fail", "isolation", str(error), "see docs/explanation/isolation.md")
    if note:
        return Finding("warn", "isolation", note, "apt-get install bubblewrap; see docs/explanation/isolation.md")
    who = "the worker's own user" if chosen.job_user is None else f"uid {chosen.job_user.uid}"
    return Finding(
        "ok", "isolation", f"jobs run as {who}, {'in' if chosen.sandbox == 'bwrap' else 'without'} bubblewrap"
    )


def _gpus(settings: HostSettings) -> Iterator[Finding]:
    gpus = Gpus()
    for number, gpu in enumerate(gpus.facts()):
        yield Finding("ok", "GPU", f"{number}: {gpu['model']}, {gpu['memory_bytes'] / 2**30:.0f} GiB, {gpu['uuid']}")
    if settings.device == "cuda" and len(gpus) < settings.slots:
        words = f"{settings.slots} slots, but the driver reports {len(gpus)} GPUs"
        yield Finding("fail", "GPU", words, "check nvidia-smi, or set MESHBOARD_SLOTS or MESHBOARD_DEVICE=cpu")
    if settings.device == "cpu" and len(gpus):
        words = f"{len(gpus)} GPUs, but the slots use the CPU"
        yield Finding("warn", "GPU", words, f"to use the GPUs, set MESHBOARD_DEVICE=cuda MESHBOARD_SLOTS={len(gpus)}")


def _heap() -> Finding:
    if library := jemalloc():
        return Finding("ok", "heap", f"ranks allocate tensors with {library}")
    words = "jemalloc is missing, so the memory of CPU ranks can be up to 50% larger"
    return Finding("warn", "heap", words, "apt-get install libjemalloc2, and restart the worker")


def _torch(settings: HostSettings) -> Finding:
    """In a process of its own, as a rank would load it."""
    advice = "pip install -c requirements.lock '.[worker]'"
    try:
        ran = subprocess.run(
            [sys.executable, "-c", TORCH], capture_output=True, text=True, timeout=TORCH_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("fail", "torch", f"cannot be tested: {error}", advice)
    if ran.returncode != 0:
        last = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
        return Finding("fail", "torch", f"does not load: {last[:300]}", advice)
    version, gpus, gloo, nccl = ran.stdout.split()
    words = f"{version}, {gpus} GPUs, gloo {gloo}, NCCL {nccl}"
    if settings.device == "cuda" and (int(gpus) < settings.slots or nccl != "True"):
        return Finding("fail", "torch", words, "torch has no CUDA, or the driver is too old; check nvidia-smi")
    return Finding("ok", "torch", words)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.host.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    found = list(findings())
    print(format_findings_as_json(found) if options.json else format_findings(found))
    return get_exit_code(found)


if __name__ == "__main__":
    sys.exit(main())
