"""Parts, one after the other, each in processes of its own and within its share of the time of a call."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from benchmarks.gpu.budget import clock, limit
from benchmarks.gpu.machine import ROOT, Fingerprint, held_by_others
from benchmarks.gpu.results import SPENT, Found, Result, State, earlier_result, found_in, pieces_file, write
from workers.host.hardware import Gpus

GRACE_S = 10.0  # between asking a part's processes to end and ending them
PR_SET_PDEATHSIG = 1
LONGEST_WHY = 300
TORCHRUN_S_OWN = r"ChildFailedError|error_file|elastic|errors\.html"  # which tell of an error, and not which


@dataclass(frozen=True)
class Part:
    """`argv` is the part's own program; it gets `--limit SECONDS` and `--out FILE`, and writes a `Found` there.

    `expected_s` is what it may well take, by which the time of a call is shared; what takes longer than `limit_s` has
    failed. `predicted` is written down before the program starts; of the figures named in `within`, the measured one
    may differ by such a share. With `skip`, the reason, nothing is run. One `of_pieces` comes last and takes as long as
    there is time; it gets `--pieces FILE` too, where it keeps what it tells of each piece.
    """

    name: str
    title: str
    argv: tuple[str, ...] = ()
    expected_s: float = 30.0
    limit_s: float = 240.0
    predicted: Mapping[str, float] = field(default_factory=dict)
    within: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    skip: str = ""
    of_pieces: bool = False


def torchrun(ranks: int, module: str, *arguments: str) -> tuple[str, ...]:
    """A module on so many ranks of this machine."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks))
    # By no name of the machine, which need not resolve.
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1")
    return (*launcher, *meeting, "-m", module, *arguments)


def run_parts(
    parts: Sequence[Part],
    folder: Path,
    machine: Fingerprint,
    say: Callable[[str], None],
    until: float,
    *,
    fresh: bool,
) -> list[Result]:
    """Each part's result, written as soon as it is known. One that fails stops no other.

    What passed in this folder before, on the same machine and commit, is kept unless `fresh`. What was cut is tried
    again first, with more time, and what failed after all else but parts of pieces; both stay what they were where
    there is no time. None is given more than `until`, by `now`, leaves to it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = {part.name: None if fresh else earlier_result(folder, part.name, machine) for part in parts}
    passed = {name for name, result in before.items() if result is not None and result["state"] == "passed"}
    ordered = sorted(parts, key=lambda part: _turn(part, before[part.name]))
    waiting = [part for part in ordered if part.name not in passed and not part.skip]
    skipped = sum(1 for part in parts if part.skip and part.name not in passed)
    left = clock(until - now())
    say(f"{len(parts)} parts: {len(passed)} passed before, {skipped} skipped, {len(waiting)} to run in at most {left}")
    results = {}
    for part in ordered:
        kept = before[part.name]
        if part.name in passed:
            assert kept is not None
            result = kept
        elif part.skip:
            result = _result(part, machine, "skipped", part.skip)
        else:
            waiting.remove(part)
            left_s = until - now()
            cut_s = kept.get("limit_s", 0.0) if kept is not None else 0.0
            limit_s = limit(part.expected_s, [other.expected_s for other in waiting], left_s, cut_s)
            result = _run(part, folder, machine, min(limit_s, part.limit_s), fresh=fresh)
            if kept is not None and result["why"] == SPENT:
                result = kept
            elif kept is not None and kept["state"] == "failed" and not part.of_pieces:
                result["notes"].append(f"failed before, on {kept['day']}: {kept['why']}")
        write(folder / f"{part.name}.json", result)
        say(_line(part, result, until - now(), len(waiting)))
        results[part.name] = result
    return [results[part.name] for part in parts]


def now() -> float:
    """Seconds of a clock that nobody sets."""
    return time.monotonic()


def begun() -> float:
    """When this process began, by `now`: torch alone may take it many seconds to import."""
    return now() - (time.time() - psutil.Process().create_time())


def _turn(part: Part, before: Result | None) -> tuple[bool, int]:
    if before is None:
        return part.of_pieces, 1
    return part.of_pieces, {"cut": 0, "failed": 2}.get(before["state"], 1)


def _line(part: Part, result: Result, left_s: float, more: int) -> str:
    why = f": {result['why']}" if result["why"] else ""
    told = f"{part.name}: {result['state']}{' before' if result.get('kept') else ''} in {result['seconds']:.0f} s{why}"
    return told if part.skip or result.get("kept") else f"{told} ({clock(left_s)} left for {more} more)"


def _result(part: Part, machine: Fingerprint, state: State, why: str) -> Result:
    return Result(
        part=part.name,
        title=part.title,
        state=state,
        why=why,
        day=time.strftime("%Y-%m-%d", time.gmtime()),
        seconds=0.0,
        machine=machine,
        measured={},
        beside=dict(part.predicted),
        notes=list(part.notes),
    )


def _run(part: Part, folder: Path, machine: Fingerprint, limit_s: float, *, fresh: bool) -> Result:
    if limit_s <= 0:
        return _result(part, machine, "skipped", SPENT)
    result, started = _result(part, machine, "passed", ""), now()
    result["notes"] += held_by_others(Gpus())
    if part.predicted:
        write(folder / f"{part.name}.predicted.json", {"written": time.time(), "figures": dict(part.predicted)})
    out, log = folder / f"{part.name}.found", folder / f"{part.name}.log"
    out.unlink(missing_ok=True)
    own = ["--limit", str(limit_s), "--out", str(out)]
    if part.of_pieces:
        own += ["--pieces", str(pieces_file(folder, part.name, machine, fresh=fresh))]
    code = _program((*part.argv, *own), log, limit_s)
    found = found_in(out)
    result["seconds"] = now() - started
    if code is None and limit_s < part.limit_s:
        result["state"], result["why"] = "cut", f"this call had {limit_s:.0f} s for it; the next has more ({log})"
        result["limit_s"] = limit_s
    elif code is None:
        result["state"], result["why"] = "failed", f"took longer than {limit_s:.0f} s ({log})"
    elif code or found is None:
        result["state"], result["why"] = "failed", f"ended with {code}: {last_words(log)} ({log})"
    else:
        _judge(part, result, found)
    return result


def _judge(part: Part, result: Result, found: Found) -> None:
    """By what a part that ended found."""
    result["measured"], result["beside"] = found["measured"], {**part.predicted, **found["beside"]}
    result["notes"] += found["notes"]
    untried = found.get("untried", [])
    wrong = [*found["wrong"], *_missed(part, found)]
    result["state"] = "failed" if wrong else "cut" if untried else "passed"
    if untried:
        wrong.append(f"out of time before {len(untried)}; run the command again: {', '.join(untried)}")
    result["why"] = "; ".join(wrong)


def _missed(part: Part, found: Found) -> Iterator[str]:
    """Figures that differ from what was predicted by more than they may."""
    for name, share in part.within.items():
        error = part.predicted[name] / found["measured"][name] - 1
        if abs(error) > share:
            yield f"{name}: the prediction has an error of {error:+.1%}, more than {share:.0%}"


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
