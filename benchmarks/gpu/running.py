"""Run the parts one by one, each in its own processes and within its share of the time of a call."""

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

from benchmarks.gpu.machine import ROOT, Fingerprint, list_busy_gpus
from benchmarks.gpu.results import (
    OUT_OF_TIME,
    PartOutput,
    PartResult,
    State,
    open_pieces_file,
    read_earlier_result,
    read_output,
    write_atomically,
)
from workers.host.hardware import Gpus

GRACE_S = 10.0  # between TERM and KILL of a part's processes
PR_SET_PDEATHSIG = 1
MAX_REASON_CHARS = 300
TORCHRUN_LINES = r"ChildFailedError|error_file|elastic|errors\.html"  # lines that report an error without its cause


@dataclass(frozen=True)
class BenchmarkPart:
    """A part with its program, which gets `--limit SECONDS` and `--out FILE` and writes a `PartOutput`.

    Attributes:
        expected_s: Expected time, by which the time of a call is shared.
        limit_s: Time after which the part has failed.
        predicted: Values that are stored before the program starts.
        within: Maximum relative difference from the predicted value by name.
        skip: Reason not to run the part.
        of_pieces: Run the part last, for the remaining time, with `--pieces FILE` for the results of its pieces.
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


def build_torchrun_command(ranks: int, module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module on these ranks of this machine."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks))
    # By no name of the machine, which need not resolve.
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1")
    return (*launcher, *meeting, "-m", module, *arguments)


def run_parts(
    parts: Sequence[BenchmarkPart],
    folder: Path,
    machine: Fingerprint,
    say: Callable[[str], None],
    until: float,
    *,
    fresh: bool,
) -> list[PartResult]:
    """Run the parts, and write each result at once. A failed part does not stop the others.

    Results that passed on this machine and commit are reused unless `fresh` is set. Parts that were cut run first, with
    more time. Parts that failed run after the others, except parts with pieces. Each keeps its old result if no time is
    left. No part runs longer than `until` of `read_clock`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = {part.name: None if fresh else read_earlier_result(folder, part.name, machine) for part in parts}
    passed = {name for name, result in before.items() if result is not None and result["state"] == "passed"}
    ordered = sorted(parts, key=lambda part: _get_sort_key(part, before[part.name]))
    waiting = [part for part in ordered if part.name not in passed and not part.skip]
    skipped = sum(1 for part in parts if part.skip and part.name not in passed)
    left = format_duration(until - read_clock())
    say(f"{len(parts)} parts: {len(passed)} passed before, {skipped} skipped, {len(waiting)} to run in at most {left}")
    results = {}
    for part in ordered:
        stored = before[part.name]
        if part.name in passed:
            assert stored is not None
            result = stored
        elif part.skip:
            result = _build_result(part, machine, "skipped", part.skip)
        else:
            waiting.remove(part)
            left_s = until - read_clock()
            cut_s = stored.get("limit_s", 0.0) if stored is not None else 0.0
            limit_s = compute_time_limit(part.expected_s, [other.expected_s for other in waiting], left_s, cut_s)
            result = _run_part(part, folder, machine, min(limit_s, part.limit_s), fresh=fresh)
            if stored is not None and result["why"] == OUT_OF_TIME:
                result = stored
            elif stored is not None and stored["state"] == "failed" and not part.of_pieces:
                result["notes"].append(f"failed before, on {stored['day']}: {stored['why']}")
        write_atomically(folder / f"{part.name}.json", result)
        say(_format_line(part, result, until - read_clock(), len(waiting)))
        results[part.name] = result
    return [results[part.name] for part in parts]


def read_clock() -> float:
    """Return seconds of a monotonic clock."""
    return time.monotonic()


def get_start_time() -> float:
    """Return the start of this process by `read_clock`, which includes the import of torch."""
    return read_clock() - (time.time() - psutil.Process().create_time())


def _get_sort_key(part: BenchmarkPart, before: PartResult | None) -> tuple[bool, int]:
    if before is None:
        return part.of_pieces, 1
    return part.of_pieces, {"cut": 0, "failed": 2}.get(before["state"], 1)


def _format_line(part: BenchmarkPart, result: PartResult, left_s: float, more: int) -> str:
    why = f": {result['why']}" if result["why"] else ""
    row = f"{part.name}: {result['state']}{' before' if result.get('kept') else ''} in {result['seconds']:.0f} s{why}"
    return row if part.skip or result.get("kept") else f"{row} ({format_duration(left_s)} left for {more} more)"


def _build_result(part: BenchmarkPart, machine: Fingerprint, state: State, why: str) -> PartResult:
    return PartResult(
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


def _run_part(part: BenchmarkPart, folder: Path, machine: Fingerprint, limit_s: float, *, fresh: bool) -> PartResult:
    if limit_s <= 0:
        return _build_result(part, machine, "skipped", OUT_OF_TIME)
    result, started = _build_result(part, machine, "passed", ""), read_clock()
    result["notes"] += list_busy_gpus(Gpus())
    if part.predicted:
        write_atomically(
            folder / f"{part.name}.predicted.json", {"written": time.time(), "figures": dict(part.predicted)}
        )
    out, log = folder / f"{part.name}.found", folder / f"{part.name}.log"
    out.unlink(missing_ok=True)
    own = ["--limit", str(limit_s), "--out", str(out)]
    if part.of_pieces:
        own += ["--pieces", str(open_pieces_file(folder, part.name, machine, fresh=fresh))]
    code = _run_program((*part.argv, *own), log, limit_s)
    found = read_output(out)
    result["seconds"] = read_clock() - started
    if code is None and limit_s < part.limit_s:
        result["state"], result["why"] = "cut", f"this call had {limit_s:.0f} s for it; the next has more ({log})"
        result["limit_s"] = limit_s
    elif code is None:
        result["state"], result["why"] = "failed", f"took longer than {limit_s:.0f} s ({log})"
    elif code or found is None:
        result["state"], result["why"] = "failed", f"ended with {code}: {find_error_line(log)} ({log})"
    else:
        _judge(part, result, found)
    return result


def _judge(part: BenchmarkPart, result: PartResult, found: PartOutput) -> None:
    """Set the state of a result from the output of a part."""
    result["measured"], result["beside"] = found["measured"], {**part.predicted, **found["beside"]}
    result["notes"] += found["notes"]
    untried = found.get("untried", [])
    wrong = [*found["wrong"], *_list_deviations(part, found)]
    result["state"] = "failed" if wrong else "cut" if untried else "passed"
    if untried:
        wrong.append(f"out of time before {len(untried)}; run the command again: {', '.join(untried)}")
    result["why"] = "; ".join(wrong)


def _list_deviations(part: BenchmarkPart, found: PartOutput) -> Iterator[str]:
    """Return figures that differ too much from their prediction."""
    for name, share in part.within.items():
        error = part.predicted[name] / found["measured"][name] - 1
        if abs(error) > share:
            yield f"{name}: the prediction has an error of {error:+.1%}, more than {share:.0%}"


def _run_program(argv: tuple[str, ...], log: Path, limit_s: float) -> int | None:
    """Return the exit status, or None if the time was over. All its processes have ended."""
    with start_program(argv, log) as process, contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(limit_s)
    return None


@contextlib.contextmanager
def start_program(argv: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program with its output in `log`, and end all its processes on exit, even after a kill."""
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
    """End with the parent, so a killed run leaves no ranks. torchrun ends its ranks at TERM."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent died before the call
        os._exit(1)


def _end(process: subprocess.Popen[bytes]) -> None:
    leader = psutil.Process(process.pid)
    family = [leader, *leader.children(recursive=True)]  # torchrun's ranks have separate sessions
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.terminate()
    for member in psutil.wait_procs(family, GRACE_S)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def find_error_line(log: Path) -> str:
    """Return the last log line with an error, or the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    row = (
        [line for line in lines if re.search(r"(?i)error\b", line) and not re.search(TORCHRUN_LINES, line)]
        or lines
        or ["it said nothing"]
    )
    return row[-1][:MAX_REASON_CHARS]


TOTAL_S = 24 * 60.0  # since the process began; what ends a part that is cut, and the table, come after
RETRY_FACTOR = 2.0  # times the time after which a part was cut, when it is tried again


def compute_time_limit(expected_s: float, later_s: Sequence[float], left_s: float, cut_s: float = 0.0) -> float:
    """Return the seconds that the next part may take.

    The part gets its expected time and half of the time that no part is expected to need. The last part gets all. If
    less time is left than all parts are expected to need, each gets its share.

    Args:
        later_s: Expected seconds of later parts.
        cut_s: Limit of this part in an earlier call, which it exceeded. It gets more if half of the rest is more.
    """
    if not later_s:
        return left_s
    expected = expected_s + sum(later_s)
    free = left_s - expected
    own = expected_s + free / 2 if free > 0 else left_s * expected_s / expected
    return max(own, min(RETRY_FACTOR * cut_s, left_s / 2))


def format_duration(seconds: float) -> str:
    """Return a duration such as '17 min 20 s'."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
