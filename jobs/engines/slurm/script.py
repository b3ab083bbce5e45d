"""What is handed to sbatch. Every value a user wrote follows a "=" in one argument and was held against its pattern."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from jobs.engines.slurm.rows import name_of
from jobs.engines.slurm.site import Site
from planner.facts.engines import slurm_of
from planner.facts.kinds import num_slots
from planner.facts.spec import JobSpec

END_OF_ORDER = "END_OF_ORDER"  # base64 has no underscore
LINE_WIDTH = 120


class Submission(NamedTuple):
    """One attempt as sbatch takes it."""

    name: str
    options: tuple[str, ...]
    script: str


def submission(spec: JobSpec, job: str, attempt: int, order: Mapping[str, Any], site: Site) -> Submission:
    """The batch job of an attempt; `order` is what the supervisor on each node reads."""
    asked = slurm_of(spec)
    name = name_of(job, attempt)
    slots = num_slots(spec) // asked.nodes
    cpus = slots * asked.cpus_per_rank
    options = {
        "job-name": name,
        "comment": f"{job}/{attempt}",
        "nodes": str(asked.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(cpus),
        "gres": f"gpu:{slots}" if spec.resources.device == "cuda" else None,
        "partition": asked.partition,
        "account": asked.account,
        "qos": asked.qos,
        "time": asked.time_limit,
        "constraint": asked.constraint,
        "exclude": asked.exclude,
        "dependency": "singleton",  # Slurm runs no two of this name at once, should it ever have been sent twice
        "output": log_of(name, site.folder),
        "chdir": site.folder,
    }
    given = tuple(f"--{option}={value}" for option, value in options.items() if value is not None)
    return Submission(name, ("--no-requeue", *given), _script(cpus, order, site))


def logs(folder: str) -> str:
    """Where Slurm puts what batch scripts print; it must be there before one is submitted."""
    return f"{folder}/slurm"


def log_of(name: str, folder: str) -> str:
    """The batch script's own output: what went wrong before a supervisor could tell."""
    return f"{logs(folder)}/{name}.out"


def _script(cpus: int, order: Mapping[str, Any], site: Site) -> str:
    """A supervisor on every node, told its order on standard input: neither argv nor environment shows a token.

    srun takes --cpus-per-task from no variable since Slurm 22.05. The script's code is what sbatch's job ends with.
    """
    text = base64.b64encode(json.dumps(order).encode()).decode()
    told = "\n".join(text[begin : begin + LINE_WIDTH] for begin in range(0, len(text), LINE_WIDTH))
    srun = f"srun --ntasks-per-node=1 --cpus-per-task={cpus} --kill-on-bad-exit=0 {shlex.quote(site.python)}"
    return f"#!/bin/sh\n{srun} -m workers.slurm <<'{END_OF_ORDER}'\n{told}\n{END_OF_ORDER}\nexit $?\n"
