"""Runs a spec on a copy of the source tree, with a fault or without, and reads what the run says of itself."""

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
LONGEST_S = 120.0
FIDELITY = re.compile(r"absolute difference ([\d,]+) B, (\d+) calls")


class Told(NamedTuple):
    """What a run showed: differences of bytes and calls over all ranks, and the sentences of its proof.

    `ended` is how it ended, where not by its proof or well. Differences are None where no rank came to its verdict.
    """

    wrong_bytes: int | None
    wrong_calls: int | None
    replicas: str
    one_process: str
    failed: str
    ended: str

    @property
    def caught_by(self) -> list[str]:
        """What of it a user would see."""
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


def copied_tree(folder: Path, edits: Sequence[Edit] = ()) -> Path:
    """What the trainer runs from, with the edits made.

    Raises:
        ValueError: where there is not exactly one of what an edit replaces.
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


def try_fault(fault: Fault, work: Path) -> Told:
    """Run a fault's spec on a tree that has it; where it goes on, what it goes on from first, on one that has not."""
    tree, checkpoints = copied_tree(work / "tree", fault.edits), work / "checkpoints"
    if not fault.resumed:
        return run(fault.spec, tree, work)
    checkpoints.mkdir()
    before = work / "before"
    before.mkdir()
    spec = fault.spec
    first = spec.train.model_copy(update={"steps": fault.resumed, "checkpoint_every": fault.resumed, "verify": "off"})
    whole = copied_tree(before / "tree")
    run(spec.model_copy(update={"train": first}), whole, before, "--checkpoint-root", str(checkpoints))
    return run(spec, tree, work, "--checkpoint-root", str(checkpoints), "--attempt", "2")


def run(spec: JobSpec, tree: Path, work: Path, *more: str) -> Told:
    """Every rank as torchrun would start it, ended after LONGEST_S. `more` arguments of the trainer."""
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
    return told(work, world, _ended(ranks))


def _ended(ranks: list[subprocess.Popen[bytes]]) -> str:
    """Wait for all; where one dies or they take too long, end the rest. Says so only where they took too long."""
    try:
        for rank in ranks:
            if rank.wait(LONGEST_S):
                return ""
    except subprocess.TimeoutExpired:
        return f"ranks wait for each other: ended after {LONGEST_S:.0f} s"
    finally:
        for rank in ranks:
            try:
                rank.wait(2)
            except subprocess.TimeoutExpired:
                os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
    return ""


def told(work: Path, world: int, ended: str) -> Told:
    """Read from what the ranks printed, which is what their logs show."""
    out = "".join((work / f"out-{rank}").read_text() for rank in range(world))
    errors = [(work / f"err-{rank}").read_text() for rank in range(world)]
    found = FIDELITY.findall(out)
    proofs = re.findall(r"^verification: (.*); ((?:differs |not |single-process |gradients ).*)$", out, re.MULTILINE)
    failed = next(
        (m[1] for e in errors if (m := re.search(r"^error: verification failed: (.*)$", e, re.MULTILINE))), ""
    )
    if not ended and not failed and not all(e == "" for e in errors):
        ended = next(lines[-1] for e in errors if (lines := e.strip().splitlines()))
    replicas, one_process = proofs[-1] if proofs else ("", "")
    return Told(
        wrong_bytes=sum(int(size.replace(",", "")) for size, _ in found) if found else None,
        wrong_calls=sum(int(calls) for _, calls in found) if found else None,
        replicas=replicas,
        one_process=one_process,
        failed=failed,
        ended=ended,
    )
