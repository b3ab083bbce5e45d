"""`make stand-in CUDA_PYTHON=PATH`: every parity layout on GPUs that are not there, beside one process, one of them
resumed, and a script.

PATH is a Python that has a CUDA build of the torch of `requirements.lock` and what the extra `worker` needs. Prints a
line a layout: what the run said of its proof, and how far its bytes are from the prediction.
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
from tests.stand_in.build import NoStandInError, build

ROOT = Path(__file__).parents[2]
EAGER = [name for name, tried in LAYOUTS.items() if not tried.train.get("compile")]  # a compiler writes kernels
EQUAL = re.compile(r"match(?:es)? the (?:single-process )?reference to (\S+)")
EXACT = "absolute difference 0 B, 0 calls"
RESUMED, SAVES, MORE = "zero3 dp2", 3, 3  # goes on from a checkpoint for so many steps more
NOT_CHECKED = re.compile(r"verification: .*(?:not compared with|final step not compared)[^;]*")
SCRIPT, SCRIPT_RANKS = "a script's groups, split and bound", 4
COUNTED = re.compile(r"^setup +(\S+) +all_reduce +(\d+) +(\d+) ", re.MULTILINE)
SENT = {("dp", "1", "4"), ("tp", "1", "8"), ("part", "1", "12"), ("world", "1", "16")}  # group, calls, bytes


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
            stand_in = build(site_of(options.python), folder)
        except NoStandInError as error:
            print(f"--python: {error}", file=sys.stderr)
            return 2
        for name in [*names, f"{RESUMED}, resumed", SCRIPT]:
            started = time.monotonic()
            if name == f"{RESUMED}, resumed":
                done = resume(options.python, on_gpus(Case(LAYOUTS[RESUMED].archs[-1], RESUMED).spec), folder, stand_in)
                verdict = verdict_of(done) if "resumed from" in done.stdout else "FAILED: it resumed nothing"
            elif name == SCRIPT:
                script = ["workers.meter", str(ROOT / "tests/stand_in/groups.py")]
                done = run(options.python, SCRIPT_RANKS, script, folder, stand_in)
                verdict = verdict_of_script(done)
            else:
                spec = on_gpus(Case(LAYOUTS[name].archs[-1], name).spec)
                done = train(options.python, spec, folder, stand_in)
                verdict = verdict_of(done)
            failed += not verdict.startswith("equal")
            print(f"{name:<44}{verdict:<60}{time.monotonic() - started:>7.1f} s", flush=True)
            if options.show and not verdict.startswith("equal"):
                print(done.stdout[-3000:], done.stderr[-6000:], flush=True)
    tried = len(names) + 2
    print(f"{tried - failed} of {tried} equal one process, to the byte of what was predicted")
    return 1 if failed else 0


def site_of(python: str) -> Path:
    """Where its torch lies."""
    code = "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    told = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if told.returncode:
        raise NoStandInError(f"{python} has no torch: {told.stderr.strip()[-300:]}")
    return Path(told.stdout.strip()).parent


def on_gpus(spec: JobSpec) -> JobSpec:
    """The same, asking for GPUs."""
    return spec.model_copy(update={"resources": spec.resources.model_copy(update={"device": "cuda"})})


def train(
    python: str, spec: JobSpec, folder: Path, stand_in: Mapping[str, str], *more: str
) -> subprocess.CompletedProcess[str]:
    (folder / "spec.json").write_text(json.dumps(spec.model_dump(mode="json")))
    trainer = ["workers.trainer", "--spec", str(folder / "spec.json"), "--data-root", str(folder), *more]
    return run(python, spec.layout.world_size, trainer, folder, stand_in)


def resume(python: str, spec: JobSpec, folder: Path, stand_in: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """What its second attempt said, or its first where that failed."""
    keeps, steps = ["--checkpoint-root", str(folder / "kept")], spec.train.steps
    saving = spec.train.model_copy(update={"checkpoint_every": SAVES})
    done = train(python, spec.model_copy(update={"train": saving}), folder, stand_in, *keeps)
    if done.returncode:
        return done
    longer = saving.model_copy(update={"steps": steps + MORE})
    return train(python, spec.model_copy(update={"train": longer}), folder, stand_in, *keeps, "--attempt", "2")


def run(
    python: str, ranks: int, module: Sequence[str], folder: Path, stand_in: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    torchrun = [python, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    environment = {**os.environ, **stand_in, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    argv = [*torchrun, *meeting, "-m", "tests.stand_in.rank", *module]
    return subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def verdict_of_script(done: subprocess.CompletedProcess[str]) -> str:
    counted = set(COUNTED.findall(done.stderr))
    return "equal to what it sent" if counted == SENT and not done.returncode else f"FAILED: {sorted(counted)}"


def verdict_of(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode:
        why = re.search(r"^(?:\[rank\d+\]: )?(stand-in: .*|\w*Error: .*)", done.stderr, re.MULTILINE)
        return f"FAILED: {why[1] if why else 'see --show'}"
    if unchecked := NOT_CHECKED.findall(done.stdout):
        return f"FAILED: {unchecked[-1]}"
    equal, lines = EQUAL.findall(done.stdout), [line for line in done.stdout.splitlines() if "traffic check:" in line]
    if not equal or not lines:
        return "FAILED: the run told nothing of itself"
    off = [line for line in lines if EXACT not in line]
    return f"FAILED: {off[0]}" if off else f"equal to {equal[-1]}; 0 B, 0 calls on {len(lines)} ranks"


if __name__ == "__main__":
    sys.exit(main())
