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

from benchmarks.gpu.rank import build_empty_result, build_parser, write_result
from benchmarks.gpu.results import PartOutput
from benchmarks.gpu.running import (
    GRACE_S,
    build_torchrun_command,
    find_error_line,
    get_start_time,
    read_clock,
    start_program,
)
from planner.facts.spec import JobSpec
from tests.parity.cases import LAYOUTS, Case, write_data

STALL_TIMEOUT_S = 60.0  # without a layout that begins or ends
MIN_LAYOUT_S = 15.0  # what is left for the last layout that is begun
SHUTDOWN_S = GRACE_S + 5.0  # of the limit, to end ranks and write down what was found


class LayoutResult(TypedDict):
    """Result of a layout on rank 0, or only its `name` when it starts. Differences are relative."""

    name: str
    wrong: NotRequired[list[str]]
    failed_before: NotRequired[str]
    gradient: NotRequired[float]
    loss: NotRequired[float]
    loss_from_cpu: NotRequired[float]
    bytes_off: NotRequired[int]
    calls_off: NotRequired[int]


def get_num_ranks(name: str) -> int:
    return build_spec(name, "fp32").layout.world_size


def build_spec(name: str, precision: str) -> JobSpec:
    """Return the spec of a layout with the last of its models, on GPUs."""
    spec = Case(LAYOUTS[name].archs[-1], name).spec
    resources = spec.resources.model_copy(update={"device": "cuda"})
    train = spec.train.model_copy(update={"precision": precision})
    return spec.model_copy(update={"resources": resources, "train": train})


def run_layouts(names: Sequence[str], precision: str, until: float, pieces: Path) -> list[LayoutResult]:
    """Run layouts until `until`, and return their results in order, with those of earlier calls in `pieces`.

    Layouts that matched before do not run again. Those that failed run after all others, and their result has the first
    failure too if they then match.
    """
    before = {one["name"]: one for one in read_finished(pieces)}
    new = [name for name in names if name not in before]
    again = [name for name in names if name in before and before[name]["wrong"]]
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        write_data(folder)
        for ranks, some in (*group_by_ranks(new), *group_by_ranks(again)):
            _run_on_ranks(ranks, some, precision, until, pieces, folder)
    result = read_finished(pieces)
    last = {one["name"]: one for one in result}
    failed = {one["name"]: "; ".join(one["wrong"]) for one in reversed(result) if one["wrong"]}
    for name, one in last.items():
        if name in failed and not one["wrong"]:
            one["failed_before"] = failed[name]
    return [last[name] for name in names if name in last]


def group_by_ranks(names: Sequence[str]) -> list[tuple[int, list[str]]]:
    return [
        (n, [name for name in names if get_num_ranks(name) == n])
        for n in sorted({get_num_ranks(name) for name in names})
    ]


def _run_on_ranks(ranks: int, names: Sequence[str], precision: str, until: float, pieces: Path, folder: Path) -> None:
    """Run each layout once, in new ranks after a layout that ended its ranks."""
    left, log, begins = list(names), folder / "log", until - MIN_LAYOUT_S
    own = ("--folder", str(folder), "--pieces", str(pieces), "--precision", precision, "--until", str(begins))
    while left and read_clock() < begins:
        pieces.touch()
        start = pieces.stat().st_size
        code = run_program(
            build_torchrun_command(ranks, "benchmarks.gpu.layouts_rank", *own, *left), log, pieces, until
        )
        result = parse_results(pieces.read_bytes()[start:])
        left = [name for name in left if name not in {one["name"] for one in result if "wrong" in one}]
        if code == 0 or (code is None and read_clock() >= until):
            return
        print(log.read_text(errors="replace"), flush=True)
        ran = result[-1]["name"] if result and "wrong" not in result[-1] else left[0]
        how = f"stood still for {STALL_TIMEOUT_S:.0f} s" if code is None else f"ended with {code}"
        append_result(pieces, LayoutResult(name=ran, wrong=[f"{how}: {find_error_line(log)}"]))
        left.remove(ran)


def read_finished(pieces: Path) -> list[LayoutResult]:
    return [one for one in parse_results(pieces.read_bytes()) if "wrong" in one]


def parse_results(lines: bytes) -> list[LayoutResult]:
    """Return the results, without a last line that was cut when its writer was killed."""
    found = []
    for line in lines.splitlines():
        with contextlib.suppress(ValueError):
            found.append(cast(LayoutResult, json.loads(line)))
    return found


def append_result(pieces: Path, one: LayoutResult) -> None:
    with pieces.open("a") as file:
        print(json.dumps(one), file=file)


def run_program(argv: Sequence[str], log: Path, told: Path, until: float) -> int | None:
    """Return the exit status, or None if the program was ended because it stalled or exceeded its time."""
    with start_program(argv, log) as process:
        while process.poll() is None:
            still_s = time.time() - told.stat().st_mtime
            if still_s > STALL_TIMEOUT_S or read_clock() >= until:
                return None
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
        return process.returncode


def summarize(names: Sequence[str], results: Sequence[LayoutResult]) -> PartOutput:
    found = build_empty_result()
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
    parser = build_parser(__doc__)
    parser.add_argument("--ranks", type=int, help="run only layouts with this number of ranks")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--pieces", type=Path, help="file of results to continue")
    parser.add_argument("names", nargs="*", metavar="LAYOUT", help="layouts to run, default all")
    options = parser.parse_args()
    names = [name for name in options.names or LAYOUTS if options.ranks in (None, get_num_ranks(name))]
    with tempfile.TemporaryDirectory() as work:
        pieces = options.pieces or Path(work) / "pieces"
        pieces.touch()
        results = run_layouts(names, options.precision, get_start_time() + options.limit - SHUTDOWN_S, pieces)
    write_result(options.out, summarize(names, results))


if __name__ == "__main__":
    main()
