"""Compare parity layouts on GPUs with a single-process reference and with the predicted bytes.

If ranks share a GPU, each rank is its own NCCL host, and NCCL uses sockets. A layout that fails or hangs is reported,
and the other layouts run. Each result is stored at once, so an interrupted call loses at most one layout.
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
from benchmarks.gpu.running import GRACE_S, begun, last_words, now, started, torchrun
from planner.facts.spec import JobSpec
from tests.parity.cases import LAYOUTS, Case, write_data

STILL_S = 60.0  # without a layout that begins or ends
LAST_S = 15.0  # what is left for the last layout that is begun
ENDING_S = GRACE_S + 5.0  # of the limit, to end ranks and write down what was found


class Told(TypedDict):
    """Of one layout, by rank 0; without what follows `name` it was begun. Differences are relative."""

    name: str
    wrong: NotRequired[list[str]]
    failed_before: NotRequired[str]
    gradient: NotRequired[float]
    loss: NotRequired[float]
    loss_from_cpu: NotRequired[float]
    bytes_off: NotRequired[int]
    calls_off: NotRequired[int]


def ranks_of(name: str) -> int:
    return spec_of(name, "fp32").layout.world_size


def spec_of(name: str, precision: str) -> JobSpec:
    """A layout's spec on the last of its models, asking for GPUs."""
    spec = Case(LAYOUTS[name].archs[-1], name).spec
    resources = spec.resources.model_copy(update={"device": "cuda"})
    train = spec.train.model_copy(update={"precision": precision})
    return spec.model_copy(update={"resources": resources, "train": train})


def tried(names: Sequence[str], precision: str, until: float, pieces: Path) -> list[Told]:
    """What was told of each, in order, here or in `pieces` before; of those that there was no time for nothing.

    What was equal before is not tried again, and what was not only after all others: where it is then, its first
    failure is told beside. All ends at `until`, by `now`.
    """
    before = {one["name"]: one for one in told_in(pieces)}
    new = [name for name in names if name not in before]
    again = [name for name in names if name in before and before[name]["wrong"]]
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        write_data(folder)
        for ranks, some in (*by_ranks(new), *by_ranks(again)):
            _on_ranks(ranks, some, precision, until, pieces, folder)
    told = told_in(pieces)
    last = {one["name"]: one for one in told}
    failed = {one["name"]: "; ".join(one["wrong"]) for one in reversed(told) if one["wrong"]}
    for name, one in last.items():
        if name in failed and not one["wrong"]:
            one["failed_before"] = failed[name]
    return [last[name] for name in names if name in last]


def by_ranks(names: Sequence[str]) -> list[tuple[int, list[str]]]:
    return [(n, [name for name in names if ranks_of(name) == n]) for n in sorted({ranks_of(name) for name in names})]


def _on_ranks(ranks: int, names: Sequence[str], precision: str, until: float, pieces: Path, folder: Path) -> None:
    """Try each once, by new ranks where one ended those before it."""
    left, log, begins = list(names), folder / "log", until - LAST_S
    own = ("--folder", str(folder), "--pieces", str(pieces), "--precision", precision, "--until", str(begins))
    while left and now() < begins:
        pieces.touch()
        start = pieces.stat().st_size
        code = ended(torchrun(ranks, "benchmarks.gpu.layouts_rank", *own, *left), log, pieces, until)
        told = told_of(pieces.read_bytes()[start:])
        left = [name for name in left if name not in {one["name"] for one in told if "wrong" in one}]
        if code == 0 or (code is None and now() >= until):
            return
        print(log.read_text(errors="replace"), flush=True)
        ran = told[-1]["name"] if told and "wrong" not in told[-1] else left[0]
        how = f"stood still for {STILL_S:.0f} s" if code is None else f"ended with {code}"
        tell_piece(pieces, Told(name=ran, wrong=[f"{how}: {last_words(log)}"]))
        left.remove(ran)


def told_in(pieces: Path) -> list[Told]:
    """Of layouts that ended."""
    return [one for one in told_of(pieces.read_bytes()) if "wrong" in one]


def told_of(lines: bytes) -> list[Told]:
    """A line that was cut when its writer was killed tells nothing."""
    found = []
    for line in lines.splitlines():
        with contextlib.suppress(ValueError):
            found.append(cast(Told, json.loads(line)))
    return found


def tell_piece(pieces: Path, one: Told) -> None:
    with pieces.open("a") as file:
        print(json.dumps(one), file=file)


def ended(argv: Sequence[str], log: Path, told: Path, until: float) -> int | None:
    """Its exit status. None where nothing new was told for too long, or its time was over, and it was ended."""
    with started(argv, log) as process:
        while process.poll() is None:
            still_s = time.time() - told.stat().st_mtime
            if still_s > STILL_S or now() >= until:
                return None
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
        return process.returncode


def summed_up(names: Sequence[str], results: Sequence[Told]) -> Found:
    found = nothing_found()
    equal = [one for one in results if not one.get("wrong")]
    found["measured"] = {"layouts equal to reference": len(equal)}
    found["beside"] = {"layouts equal to reference": len(names)}
    if equal:
        found["measured"] |= {
            "gradients, difference from reference": max(one["gradient"] for one in equal),
            "losses, difference from reference": max(one["loss"] for one in equal),
            "losses, difference from CPU reference": max(one["loss_from_cpu"] for one in equal),
            "bytes, difference": sum(one["bytes_off"] for one in equal),
            "calls, difference": sum(one["calls_off"] for one in equal),
        }
        found["beside"] |= {"bytes, difference": 0, "calls, difference": 0}
    found["wrong"] = [f"{one['name']}: {'; '.join(one['wrong'])}" for one in results if one.get("wrong")]
    found["notes"] = [
        f"{one['name']}: equal when tried again; before: {why}" for one in results if (why := one.get("failed_before"))
    ]
    known = {one["name"] for one in results}
    found["untried"] = [name for name in names if name not in known]
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, help="run only layouts with this number of ranks")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--pieces", type=Path, help="file of results to continue")
    parser.add_argument("names", nargs="*", metavar="LAYOUT", help="layouts to run, default all")
    options = parser.parse_args()
    names = [name for name in options.names or LAYOUTS if options.ranks in (None, ranks_of(name))]
    with tempfile.TemporaryDirectory() as work:
        pieces = options.pieces or Path(work) / "pieces"
        pieces.touch()
        results = tried(names, options.precision, begun() + options.limit - ENDING_S, pieces)
    tell(options.out, summed_up(names, results))


if __name__ == "__main__":
    main()
