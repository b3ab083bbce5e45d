"""Build what sbatch receives. Each value from a user follows "=" in one argument and was checked by a pattern."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from django.conf import settings

from contracts.control import END_WARNING_SUFFIX
from jobs.queue.slurm.states import format_job_name
from planner.facts.kinds import get_num_slots, get_slurm_spec, saves_checkpoints
from planner.facts.spec import JobSpec

END_OF_ORDER = "END_OF_ORDER"  # base64 has no underscore
LINE_WIDTH = 120
MAX_WARNING_S = 65535  # limit of sbatch
MAX_SAVE_FRACTION = 4  # at most 1/4 of a time limit is used for saving


class Site(NamedTuple):
    """The Slurm cluster of the board, from the MESHBOARD_SLURM_ variables."""

    folder: str  # on all nodes
    python: str  # on all nodes
    board: str  # URL of the board for the nodes
    login: str = ""  # login node, or "" for this machine
    ssh_config: str = ""
    ca_file: str = ""  # certificates for the URL of the board, or "" for those of the nodes

    def read_certificates(self) -> str:
        """Return the certificates as PEM, or an empty text. Raises OSError."""
        return Path(self.ca_file).read_text() if self.ca_file else ""


def get_site() -> Site | None:
    return None if settings.SLURM is None else Site(**settings.SLURM)


class Submission(NamedTuple):
    """The arguments and the script of one attempt for sbatch."""

    name: str
    options: tuple[str, ...]
    script: str


def build_submission(
    spec: JobSpec, job: str, attempt: int, order: Mapping[str, Any], site: Site, save_s: float
) -> Submission:
    """Build the batch job of an attempt.

    Args:
        order: Input of the supervisor on each node.
        save_s: Seconds before the time limit at which Slurm warns runs that save checkpoints.
    """
    slurm, name = get_slurm_spec(spec), format_job_name(job, attempt)
    slots = get_num_slots(spec) // slurm.nodes
    cpus = slots * slurm.cpus_per_rank
    options = {
        "job-name": name,
        "comment": f"{job}/{attempt}",
        "nodes": str(slurm.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(cpus),
        "gres": f"gpu:{slots}" if spec.resources.device == "cuda" else None,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "time": slurm.time_limit,
        "constraint": slurm.constraint,
        "exclude": slurm.exclude,
        "signal": f"B:USR1@{_compute_warning_s(slurm.time_limit, save_s)}" if saves_checkpoints(spec) else None,
        "dependency": "singleton",  # Slurm runs one job per name, in case an attempt was submitted twice
        "output": get_log_path(name, site.folder),
        "chdir": site.folder,
    }
    arguments = tuple(f"--{option}={value}" for option, value in options.items() if value is not None)
    return Submission(name, ("--no-requeue", *arguments), _build_script(cpus, order, site))


def get_log_folder(folder: str) -> str:
    """Return the folder for the output of batch scripts, which must exist before a submission."""
    return f"{folder}/slurm"


def get_log_path(name: str, folder: str) -> str:
    return f"{get_log_folder(folder)}/{name}.out"


def _build_script(cpus: int, order: Mapping[str, Any], site: Site) -> str:
    """Build the script that starts a supervisor on each node.

    The order is standard input, so neither arguments nor environment show its token. Since Slurm 22.05, srun reads
    --cpus-per-task from no variable. Slurm's warning goes only to the shell, because it would end the ranks, and the
    shell handles it only during `wait`. SIGTERM goes to all: supervisors save, and the script waits for them.
    """
    text = base64.b64encode(json.dumps(order).encode()).decode()
    lines = "\n".join(text[begin : begin + LINE_WIDTH] for begin in range(0, len(text), LINE_WIDTH))
    srun = f"srun --ntasks-per-node=1 --cpus-per-task={cpus} --kill-on-bad-exit=0 {shlex.quote(site.python)}"
    warned = f'{shlex.quote(f"{site.folder}/runs")}/"$SLURM_JOB_ID.{END_WARNING_SUFFIX}"'
    return f"""#!/bin/sh
warned={warned}
trap 'touch "$warned"' USR1
trap : TERM
{srun} -m workers.slurm <<'{END_OF_ORDER}' &
{lines}
{END_OF_ORDER}
while wait $!; code=$?; kill -0 $! 2>/dev/null; do :; done
wait $!; last=$?  # the code if the warning came at the end, or 127 if `code` has it
[ $last -eq 127 ] || code=$last
exit $code
"""


def _compute_warning_s(time_limit: str | None, save_s: float) -> int:
    """Return the seconds before the end at which Slurm warns a run."""
    warning_s = min(MAX_WARNING_S, max(1, round(save_s)))
    if time_limit is None:
        return warning_s
    days, _, clock = time_limit.rpartition("-")
    hours, minutes, seconds = map(int, clock.split(":"))
    limit_s = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    return max(1, min(warning_s, limit_s // MAX_SAVE_FRACTION))
