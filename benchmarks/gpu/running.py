"""Parts, one after the other, each in processes of its own and within its own time."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from benchmarks.gpu.machine import ROOT, Fingerprint, held_by_others
from benchmarks.gpu.results import SPENT, Found, Result, State, earlier_result, found_in, write
from workers.host.facts.gpus import Gpus

GRACE_S = 10.0  # between asking a part's processes to end and ending them
PR_SET_PDEATHSIG = 1
LONGEST_WHY = 300
TORCHRUN_S_OWN = r"ChildFailedError|error_file|elastic|errors\.html"  # which tell of an error, and not which


@dataclass(frozen=True)
class Part:
    """`argv` is the part's own program; it gets `--out FILE` and writes a `Found` there.

    `predicted` is written down before the program starts; of the figures named in `within`, the measured one may differ
    by such a share. With `skip`, the reason, nothing is run.
    """

    name: str
    title: str
    argv: tuple[str, ...] = ()
    limit_s: float = 120.0
    predicted: Mapping[str, float] = field(default_factory=dict)
    within: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    skip: str = ""


def torchrun(ranks: int, module: str, *arguments: str) -> tuple[str, ...]:
    """A module on so many ranks of this machine."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks))
    # By no name of the machine, which need not resolve.
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1")
    return (*launcher, *meeting, "-m", module, *arguments)


def run_parts(
    parts: Iterable[Part],
    folder: Path,
    machine: Fingerprint,
    say: Callable[[str], None],
    total_s: float,
    *,
    fresh: bool,
) -> list[Result]:
    """Each part's result, written as soon as it is known. One that fails stops no other.

    What passed in this folder before, on the same machine and commit, is kept unless `fresh`; what failed is tried
    again after all else, and stays failed where there is no time for it. After `total_s` no other part begins, and one
    that runs is cut.
    """
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + total_s
    parts = list(parts)
    before = {part.name: None if fresh else earlier_result(folder, part.name, machine) for part in parts}
    failed = {name for name, result in before.items() if result is not None and result["state"] == "failed"}
    results = {}
    for part in sorted(parts, key=lambda part: part.name in failed):
        kept = before[part.name]
        result = _run(part, folder, machine, until - time.monotonic()) if kept is None or part.name in failed else kept
        if kept is not None and result["why"] == SPENT:
            result = kept
        write(folder / f"{part.name}.json", result)
        why = f": {result['why']}" if result["why"] else ""
        say(f"{part.name}: {result['state']}{' before' if result is kept else ''} in {result['seconds']:.0f} s{why}")
        results[part.name] = result
    return [results[part.name] for part in parts]


def _run(part: Part, folder: Path, machine: Fingerprint, left_s: float) -> Result:
    started, notes = time.monotonic(), list(part.notes)

    def result(
        state: State, why: str, measured: dict[str, float] | None = None, beside: Mapping[str, float] | None = None
    ) -> Result:
        return Result(
            part=part.name,
            title=part.title,
            state=state,
            why=why,
            day=time.strftime("%Y-%m-%d", time.gmtime()),
            seconds=time.monotonic() - started,
            machine=machine,
            measured=measured or {},
            beside={**part.predicted, **(beside or {})},
            notes=notes,
        )

    if part.skip:
        return result("skipped", part.skip)
    if left_s <= 0:
        return result("skipped", SPENT)
    notes += held_by_others(Gpus())
    if part.predicted:
        write(folder / f"{part.name}.predicted.json", {"written": time.time(), "figures": dict(part.predicted)})
    out, log = folder / f"{part.name}.found", folder / f"{part.name}.log"
    out.unlink(missing_ok=True)
    limit_s = min(part.limit_s, left_s)
    code = _program((*part.argv, "--out", str(out)), log, limit_s)
    found = found_in(out)
    if code is None and limit_s < part.limit_s:
        return result("skipped", SPENT)
    if code is None:
        return result("failed", f"took longer than {limit_s:.0f} s ({log})")
    if code or found is None:
        return result("failed", f"ended with {code}: {last_words(log)} ({log})")
    made = result("passed", "", found["measured"], found["beside"])
    made["notes"] += found["notes"]
    if wrong := [*found["wrong"], *_missed(part, found)]:
        made["state"], made["why"] = "failed", "; ".join(wrong)
    return made


def _missed(part: Part, found: Found) -> Iterator[str]:
    """Figures that differ from what was predicted by more than they may."""
    for name, share in part.within.items():
        apart = found["measured"][name] / part.predicted[name] - 1
        if abs(apart) > share:
            yield f"{name} differs from the prediction by {apart:+.1%}, more than {share:.0%}"


def _program(argv: tuple[str, ...], log: Path, limit_s: float) -> int | None:
    """Its exit status; None where its time was over. None of its processes is left."""
    with started(argv, log) as process, contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(limit_s)
    return None


@contextlib.contextmanager
def started(argv: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program that says what it says in `log`. None of its processes is left, be it that this one is killed."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    dies = partial(_die_with, os.getpid())
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, preexec_fn=dies
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                _end(process)


def _die_with(parent: int) -> None:
    """What is measured next must not share its GPU with what a killed run left; torchrun ends its ranks at TERM."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def _end(process: subprocess.Popen[bytes]) -> None:
    leader = psutil.Process(process.pid)
    family = [leader, *leader.children(recursive=True)]  # torchrun's ranks lead sessions of their own
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.terminate()
    for member in psutil.wait_procs(family, GRACE_S)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def last_words(log: Path) -> str:
    """The last line of the log that tells of an error, else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    told = (
        [line for line in lines if re.search(r"(?i)error\b", line) and not re.search(TORCHRUN_S_OWN, line)]
        or lines
        or ["it said nothing"]
    )
    return told[-1][:LONGEST_WHY]
