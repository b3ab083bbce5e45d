"""Run one rank of a training job with checkpoints, and write its telemetry to a file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from planner.facts.parse_spec import parse_spec
from workers.checkpoint.folder import get_checkpoint_location
from workers.meter import Recorder
from workers.trainer.__main__ import run
from workers.trainer.errors import DivergedError, UserError, VerificationError


class ItemList:
    """Collect telemetry items in place of an exporter."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def send(self, item: Any) -> None:
        self.items.append(item)


def main() -> int:
    folder, root, job, attempt = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    torch.set_num_threads(1)
    spec = parse_spec(json.loads((folder / "spec.json").read_text()))
    rank, messages, recorder = int(os.environ["RANK"]), ItemList(), Recorder(int(os.environ["RANK"]))
    problem = None
    try:
        run(spec, rank, root.parent / "data", recorder, messages, get_checkpoint_location(spec, root, job, attempt))  # type: ignore[arg-type]
    except (UserError, DivergedError, VerificationError) as error:
        problem = str(error)
    content = {"items": messages.items, "problem": problem, "cells": recorder.get_cells()}
    (folder / f"said-{rank}.json").write_text(json.dumps(content))
    return 0
