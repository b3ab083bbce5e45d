"""Every parity layout of so many ranks on real GPUs, each beside one process and to the byte of what was predicted.

Ranks may be more than GPUs: NCCL then takes each for one alone on its host, and sends through sockets. A layout that
ends its ranks, or that nobody comes out of, is told as such, and the others go on.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NotRequired, TypedDict, cast

from benchmarks.gpu.rank import arguments, nothing_found, tell
from benchmarks.gpu.results import Found
from benchmarks.gpu.running import last_words, started, torchrun
from planner.facts.spec import JobSpec
from tests.parity.cases import LAYOUTS, Case, write_data

STILL_S = 60.0  # without a layout that begins or ends
REST_S = 15.0  # of the limit, for what comes after the last layout
TOLD = "told.jsonl"


class Told(TypedDict):
    """Of one layout, by rank 0; without what follows `name` it was begun. Differences are relative."""

    name: str
    wrong: NotRequired[list[str]]
    gradient: NotRequired[float]
    loss: NotRequired[float]
    loss_from_cpu: NotRequired[float]
    bytes_off: NotRequired[int]
    calls_off: NotRequired[int]


def layouts_of(ranks: int) -> list[str]:
    return [name for name in LAYOUTS if spec_of(name, "fp32").layout.world_size == ranks]


def spec_of(name: str, precision: str) -> JobSpec:
    """A layout's spec on the last of its models, asking for GPUs."""
    spec = Case(LAYOUTS[name].archs[-1], name).spec
    resources = spec.resources.model_copy(update={"device": "cuda"})
    train = spec.train.model_copy(update={"precision": precision})
    return spec.model_copy(update={"resources": resources, "train": train})


def tried(names: Sequence[str], ranks: int, precision: str, limit_s: float) -> list[Told]:
    """What was told of each, in order; of those that there was no time for nothing."""
    until, results = time.monotonic() + limit_s - REST_S, list[Told]()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        write_data(folder)
        while (left := list(names[len(results) :])) and time.monotonic() < until:
            (folder / TOLD).write_text("")
            own = ("--folder", str(folder), "--precision", precision, "--until", str(until))
            log = folder / "log"
            argv = torchrun(ranks, "benchmarks.gpu.layouts_rank", *own, *left)
            code = ended(argv, log, folder / TOLD, until + REST_S)
            told = [cast(Told, json.loads(line)) for line in (folder / TOLD).read_text().splitlines()]
            results += [one for one in told if "wrong" in one]
            if code == 0:
                break
            print(log.read_text(errors="replace"), flush=True)
            begun = told[-1]["name"] if told and "wrong" not in told[-1] else left[0]
            how = f"stood still for {STILL_S:.0f} s" if code is None else f"ended with {code}"
            results.append(Told(name=begun, wrong=[f"{how}: {last_words(log)}"]))
    return results


def ended(argv: Sequence[str], log: Path, told: Path, until: float) -> int | None:
    """Its exit status. None where nothing new was told for too long, and it was ended."""
    with started(argv, log) as process:
        while process.poll() is None:
            still_s = time.time() - told.stat().st_mtime
            if still_s > STILL_S or time.monotonic() > until:
                return None
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
        return process.returncode


def summed_up(names: Sequence[str], results: Sequence[Told]) -> Found:
    found = nothing_found()
    equal = [one for one in results if not one.get("wrong")]
    found["measured"] = {"layouts equal to one process": len(equal)}
    found["beside"] = {"layouts equal to one process": len(names)}
    if equal:
        found["measured"] |= {
            "gradients from one process, relative": max(one["gradient"] for one in equal),
            "losses from one process, relative": max(one["loss"] for one in equal),
            "losses from one process on the CPU, relative": max(one["loss_from_cpu"] for one in equal),
            "bytes off": sum(one["bytes_off"] for one in equal),
            "calls off": sum(one["calls_off"] for one in equal),
        }
        found["beside"] |= {"bytes off": 0, "calls off": 0}
    found["wrong"] = [f"{one['name']}: {'; '.join(one['wrong'])}" for one in results if one.get("wrong")]
    if untried := names[len(results) :]:
        found["wrong"].append(f"no time for {len(untried)}: {', '.join(untried)}")
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("names", nargs="*", metavar="LAYOUT", help="all of so many ranks where none is named")
    options = parser.parse_args()
    names = options.names or layouts_of(options.ranks)
    results = tried(names, options.ranks, options.precision, options.limit)
    tell(options.out, summed_up(names, results))


if __name__ == "__main__":
    main()
