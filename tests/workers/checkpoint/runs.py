"""Run training jobs with checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from planner.facts.parse_spec import parse_spec
from planner.facts.spec import JobSpec
from tests.parity.cases import SIZES, VARIANTS
from tests.support.ranks import run_ranks


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
    said = [json.loads((folder / f"said-{rank}.json").read_text()) for rank in range(spec.layout.world_size)]
    losses = {item["step"]: item["loss"] for item in said[0]["items"] if item["kind"] == "step"}
    return Ran(losses, [s["items"] for s in said], said[0]["problem"], done.stdout)
