"""Run all parity layouts, a resumed run and a script on stand-in GPUs: `make stand-in CUDA_PYTHON=PATH`.

PATH is a Python with the torch version of `requirements.lock` in a CUDA build, and the packages of the extra
`worker`.
The command prints a line per layout with its verification and its difference from predicted bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from planner.facts.spec import JobSpec
from tests.parity.cases import LAYOUTS, Case, write_data
from tests.stand_in.build import StandInBuildError, build

ROOT = Path(__file__).parents[2]
EAGER = [name for name, tried in LAYOUTS.items() if not tried.train.get("compile")]  # a compiler writes kernels
MATCHES_REFERENCE = re.compile(r"match(?:es)? the (?:single-process )?reference to (\S+)")
EXACT_TRAFFIC = "absolute difference 0 B, 0 calls"
RESUMED, SAVES, MORE = "zero3 dp2", 3, 3  # number of steps after the resume
NOT_CHECKED = re.compile(r"verification: .*(?:not compared with|final step not compared)[^;]*")
SCRIPT, SCRIPT_RANKS = "a script's groups, split and bound", 4
SETUP_CALL = re.compile(r"^setup +(\S+) +all_reduce +(\d+) +(\d+) ", re.MULTILINE)
# group, calls, bytes
EXPECTED_CALLS = {("dp", "1", "4"), ("tp", "1", "8"), ("part", "1", "12"), ("world", "1", "16")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="a Python with a CUDA build of torch")
    parser.add_argument("--show", action="store_true", help="all that a run says that fails")
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help="all of them where none is named")
    options = parser.parse_args()
    if unknown := set(options.layouts) - set(EAGER):
        parser.error(f"no such layout, or a compiled one: {', '.join(sorted(unknown))}")
    names, failed = options.layouts or EAGER, 0
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        write_data(folder)
        try:
            stand_in = build(find_site_packages(options.python), folder)
        except StandInBuildError as error:
            print(f"--python: {error}", file=sys.stderr)
            return 2
        for name in [*names, f"{RESUMED}, resumed", SCRIPT]:
            started = time.monotonic()
            if name == f"{RESUMED}, resumed":
                done = run_resumed_training(
                    options.python, request_gpus(Case(LAYOUTS[RESUMED].archs[-1], RESUMED).spec), folder, stand_in
                )
                verdict = judge_training(done) if "resumed from" in done.stdout else "FAILED: it resumed nothing"
            elif name == SCRIPT:
                script = ["workers.meter", str(ROOT / "tests/stand_in/groups.py")]
                done = run_ranks(options.python, SCRIPT_RANKS, script, folder, stand_in)
                verdict = judge_script(done)
            else:
                spec = request_gpus(Case(LAYOUTS[name].archs[-1], name).spec)
                done = run_training(options.python, spec, folder, stand_in)
                verdict = judge_training(done)
            failed += not verdict.startswith("equal")
            print(f"{name:<44}{verdict:<60}{time.monotonic() - started:>7.1f} s", flush=True)
            if options.show and not verdict.startswith("equal"):
                print(done.stdout[-3000:], done.stderr[-6000:], flush=True)
    tried = len(names) + 2
    print(f"{tried - failed} of {tried} match the single-process reference and the predicted bytes")
    return 1 if failed else 0


def find_site_packages(python: str) -> Path:
    """Return the folder of torch."""
    code = "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    result = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if result.returncode:
        raise StandInBuildError(f"{python} has no torch: {result.stderr.strip()[-300:]}")
    return Path(result.stdout.strip()).parent


def request_gpus(spec: JobSpec) -> JobSpec:
    """Return the spec with CUDA devices."""
    return spec.model_copy(update={"resources": spec.resources.model_copy(update={"device": "cuda"})})


def run_training(
    python: str, spec: JobSpec, folder: Path, stand_in: Mapping[str, str], *more: str
) -> subprocess.CompletedProcess[str]:
    (folder / "spec.json").write_text(json.dumps(spec.model_dump(mode="json")))
    trainer = ["workers.trainer", "--spec", str(folder / "spec.json"), "--data-root", str(folder), *more]
    return run_ranks(python, spec.layout.world_size, trainer, folder, stand_in)


def run_resumed_training(
    python: str, spec: JobSpec, folder: Path, stand_in: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Return the result of the second attempt, or of the first if that failed."""
    keeps, steps = ["--checkpoint-root", str(folder / "kept")], spec.train.steps
    saving = spec.train.model_copy(update={"checkpoint_every": SAVES})
    done = run_training(python, spec.model_copy(update={"train": saving}), folder, stand_in, *keeps)
    if done.returncode:
        return done
    longer = saving.model_copy(update={"steps": steps + MORE})
    return run_training(python, spec.model_copy(update={"train": longer}), folder, stand_in, *keeps, "--attempt", "2")


def run_ranks(
    python: str, ranks: int, module: Sequence[str], folder: Path, stand_in: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    torchrun = [python, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    environment = {**os.environ, **stand_in, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    argv = [*torchrun, *meeting, "-m", "tests.stand_in.rank", *module]
    return subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def judge_script(done: subprocess.CompletedProcess[str]) -> str:
    counted = set(SETUP_CALL.findall(done.stderr))
    return (
        "equal to what it sent" if counted == EXPECTED_CALLS and not done.returncode else f"FAILED: {sorted(counted)}"
    )


def judge_training(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode:
        why = re.search(r"^(?:\[rank\d+\]: )?(stand-in: .*|\w*Error: .*)", done.stderr, re.MULTILINE)
        return f"FAILED: {why[1] if why else 'see --show'}"
    if unchecked := NOT_CHECKED.findall(done.stdout):
        return f"FAILED: {unchecked[-1]}"
    equal, lines = (
        MATCHES_REFERENCE.findall(done.stdout),
        [line for line in done.stdout.splitlines() if "traffic check:" in line],
    )
    if not equal or not lines:
        return "FAILED: the run reported no result"
    off = [line for line in lines if EXACT_TRAFFIC not in line]
    return f"FAILED: {off[0]}" if off else f"equal to {equal[-1]}; 0 B, 0 calls on {len(lines)} ranks"


if __name__ == "__main__":
    sys.exit(main())
