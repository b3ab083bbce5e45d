"""Run a spec on a copy of the source tree, with or without a fault, and read the verification of the run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from planner.facts.spec import JobSpec
from tests.mutations.faults import Edit, Fault
from tests.parity.cases import write_data
from webapp.runner import find_free_port

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("contracts", "planner", "workers")
SECOND_IMPLEMENTATION = "tests/workers/trainer/test_independent_step.py"
TEST_FILES = (SECOND_IMPLEMENTATION, "tests/parity/cases.py", "tests/parity/rank.py")
TIMEOUT_S = 120.0
SECOND_IMPLEMENTATION_TIMEOUT_S = 600.0
TRAFFIC_CHECK = re.compile(r"absolute difference ([\d,]+) B, (\d+) calls")


class RunChecks(NamedTuple):
    """Differences of bytes and calls over all ranks, and sentences of the verification.

    `ended` is the reason if the run ended in another way. Differences are None if no rank reported its traffic check.
    """

    wrong_bytes: int | None
    wrong_calls: int | None
    replicas: str
    one_process: str
    failed: str
    ended: str

    @property
    def detected_by(self) -> list[str]:
        """Checks of the run that a user would see fail."""
        seen = []
        if self.wrong_bytes or self.wrong_calls:
            seen.append("bytes and calls")
        if self.replicas.startswith("replicas differ"):
            seen.append("replicas")
        if self.one_process.startswith("differs from"):
            seen.append("one process")
        if "; extra final step differs" in self.one_process:
            seen.append("one step more")
        if self.ended:
            seen.append("the run ends")
        return seen


def copy_tree(folder: Path, edits: Sequence[Edit] = ()) -> Path:
    """Copy the packages of the trainer, and apply the edits.

    Raises:
        ValueError: The old text of an edit does not occur exactly once.
    """
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for edit in edits:
        path = folder / edit.file
        source = path.read_text()
        if source.count(edit.old) != 1:
            raise ValueError(f"{edit.file} has {source.count(edit.old)} of {edit.old!r}, and must have one")
        path.write_text(source.replace(edit.old, edit.new))
    return folder


def try_fault(fault: Fault, work: Path, precision: str = "fp32") -> RunChecks:
    """Run the spec of a fault on a tree with the fault. A resumed run starts from a run without it."""
    tree, checkpoints = copy_tree(work / "tree", fault.edits), work / "checkpoints"
    spec = fault.build_spec(precision)
    if not fault.resumed:
        return run_spec(spec, tree, work)
    checkpoints.mkdir()
    before = work / "before"
    before.mkdir()
    first = spec.train.model_copy(update={"steps": fault.resumed, "checkpoint_every": fault.resumed, "verify": "off"})
    whole = copy_tree(before / "tree")
    run_spec(spec.model_copy(update={"train": first}), whole, before, "--checkpoint-root", str(checkpoints))
    return run_spec(spec, tree, work, "--checkpoint-root", str(checkpoints), "--attempt", "2")


def differs_from_second_implementation(tree: Path) -> bool:
    """Return whether the trainer of a tree fails the test against a second implementation, which no run contains."""
    for name in TEST_FILES:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    plain = ("-q", "-x", "-c", os.devnull, "--rootdir", str(tree), "--noconftest", "-p", "no:django")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plain, "-p", "no:cacheprovider", SECOND_IMPLEMENTATION],
        cwd=tree,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=SECOND_IMPLEMENTATION_TIMEOUT_S,
        check=False,
    )
    if done.returncode not in (0, 1):  # 1: a test failed
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.returncode == 1


def run_spec(spec: JobSpec, tree: Path, work: Path, *more: str) -> RunChecks:
    """Run all ranks as torchrun does, for at most TIMEOUT_S. `more` has arguments of the trainer."""
    data_root = work / "data"
    data_root.mkdir()
    write_data(data_root)
    (work / "spec.json").write_text(spec.model_dump_json())
    world = spec.layout.world_size
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    quiet = {
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    files = ("--spec", str(work / "spec.json"), "--data-root", str(data_root))
    argv = [sys.executable, "-m", "workers.trainer", *files, *more]
    ranks = [
        subprocess.Popen(
            argv,
            cwd=tree,
            env={**os.environ, **quiet, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": str(tree)},
            stdout=(work / f"out-{rank}").open("w"),
            stderr=(work / f"err-{rank}").open("w"),
            start_new_session=True,
        )
        for rank in range(world)
    ]
    return parse_checks(work, world, _wait_for_ranks(ranks))


def _wait_for_ranks(ranks: list[subprocess.Popen[bytes]]) -> str:
    """Wait for all ranks, and end the rest if one fails. Return a reason only after a timeout."""
    try:
        for rank in ranks:
            if rank.wait(TIMEOUT_S):
                return ""
    except subprocess.TimeoutExpired:
        return f"ranks wait for each other: ended after {TIMEOUT_S:.0f} s"
    finally:
        for rank in ranks:
            try:
                rank.wait(2)
            except subprocess.TimeoutExpired:
                os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
    return ""


def parse_checks(work: Path, world: int, ended: str) -> RunChecks:
    """Parse the output of the ranks, which their logs show."""
    out = "".join((work / f"out-{rank}").read_text() for rank in range(world))
    errors = [(work / f"err-{rank}").read_text() for rank in range(world)]
    found = TRAFFIC_CHECK.findall(out)
    proofs = re.findall(r"^verification: (.*); ((?:differs |not |single-process |gradients, ).*)$", out, re.MULTILINE)
    failed = next(
        (m[1] for e in errors if (m := re.search(r"^error: verification failed: (.*)$", e, re.MULTILINE))), ""
    )
    if not ended and not failed and not all(e == "" for e in errors):
        ended = next(lines[-1] for e in errors if (lines := e.strip().splitlines()))
    replicas, one_process = proofs[-1] if proofs else ("", "")
    return RunChecks(
        wrong_bytes=sum(int(size.replace(",", "")) for size, _ in found) if found else None,
        wrong_calls=sum(int(calls) for _, calls in found) if found else None,
        replicas=replicas,
        one_process=one_process,
        failed=failed,
        ended=ended,
    )
