"""Run training jobs with checkpoints, and plant code in the `.metadata` of a checkpoint."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any, NamedTuple

from planner.facts.parse_spec import parse_spec
from planner.facts.spec import JobSpec
from tests.parity.cases import SIZES, VARIANTS
from tests.support.ranks import run_ranks
from workers.checkpoint import folder
from workers.checkpoint.folder import MANIFEST
from workers.checkpoint.load import METADATA


class Ran(NamedTuple):
    """Store the results of a run. `losses` are keyed by step."""

    losses: dict[int, float]
    items: list[list[dict[str, Any]]]
    problem: str | None
    output: str

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [item for items in self.items for item in items if item["kind"] == kind]


def make_spec(layout: dict[str, Any], arch: str = "gpt", variant: str = "", **train: Any) -> JobSpec:
    settings = {"steps": 6, "global_batch": 8, "micro_batches": 2, "seq_len": 32, "eval_every": 0, "warmup_steps": 2}
    return parse_spec({"model": SIZES[arch] | VARIANTS[variant], "layout": layout, "train": settings | train})


def run(
    spec: JobSpec,
    root: Path,
    job: str = "job",
    attempt: int = 1,
    module: str = "tests.workers.checkpoint.rank",
    **variables: str,
) -> Ran:
    """Run a job with checkpoints below `root`. `variables` are set in its environment."""
    (root.parent / "data").mkdir(exist_ok=True)
    folder = root.parent / f"run-{job}-{attempt}-{len(list(root.parent.glob('run-*')))}"
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text(spec.model_dump_json())
    done = run_ranks(
        spec.layout.world_size, module, str(folder), str(root), job, str(attempt), limit_s=200, **variables
    )
    assert done.returncode == 0, done.stderr[-6000:]
    messages = [json.loads((folder / f"said-{rank}.json").read_text()) for rank in range(spec.layout.world_size)]
    losses = {item["step"]: item["loss"] for item in messages[0]["items"] if item["kind"] == "step"}
    return Ran(losses, [s["items"] for s in messages], messages[0]["problem"], done.stdout)


class Runs:
    """Create a file when it is unpickled, and return the original value."""

    def __init__(self, mark: Path, then: object) -> None:
        self._mark, self._then = mark, then

    def __reduce__(self) -> tuple[Any, ...]:
        words = "(__import__('pathlib').Path(%r).touch(), __import__('pickle').loads(%r))[1]"
        return eval, (words % (str(self._mark), pickle.dumps(self._then)),)


def plant(checkpoint: Path, data: bytes, *changed: str) -> None:
    """Replace `.metadata`, and update sizes and CRC-32 in the manifest."""
    (checkpoint / METADATA).write_bytes(data)
    path = checkpoint / MANIFEST
    content = json.loads(path.read_text())
    content["files"] |= folder.describe_files(checkpoint, [METADATA, *changed])
    path.write_text(json.dumps(content))


def poison(checkpoint: Path, mark: Path) -> None:
    """Plant code that torch's reader executes, and that still loads the checkpoint."""
    true = pickle.loads((checkpoint / METADATA).read_bytes())
    plant(checkpoint, pickle.dumps(Runs(mark, true)))
