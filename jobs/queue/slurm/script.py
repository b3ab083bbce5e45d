"""What is handed to sbatch. Every value a user wrote follows a "=" in one argument and was held against its pattern.

The Slurm cluster that this board runs jobs on, if any.

Whether jobs can run on Slurm from here, for `manage.py doctor`.
"""

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
MOST_WARNING_S = 65535  # that sbatch takes
SHARE_TO_SAVE = 4  # a fourth of a time limit is kept for saving at most


class Submission(NamedTuple):
    """One attempt as sbatch takes it."""

    name: str
    options: tuple[str, ...]
    script: str


def build_submission(
    spec: JobSpec, job: str, attempt: int, order: Mapping[str, Any], site: Site, save_s: float
) -> Submission:
    """The batch job of an attempt; `order` is what the supervisor on each node reads. `save_s`: how long before Slurm
    ends it the run is told to save, where it saves."""
    asked = get_slurm_spec(spec)
    name = format_job_name(job, attempt)
    slots = get_num_slots(spec) // asked.nodes
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
        "signal": f"B:USR1@{_warning_s(asked.time_limit, save_s)}" if saves_checkpoints(spec) else None,
        "dependency": "singleton",  # Slurm runs no two of this name at once, should it ever have been sent twice
        "output": get_log_path(name, site.folder),
        "chdir": site.folder,
    }
    given = tuple(f"--{option}={value}" for option, value in options.items() if value is not None)
    return Submission(name, ("--no-requeue", *given), _script(cpus, order, site))


def get_log_folder(folder: str) -> str:
    """Where Slurm puts what batch scripts print; it must be there before one is submitted."""
    return f"{folder}/slurm"


def get_log_path(name: str, folder: str) -> str:
    """The batch script's own output: what went wrong before a supervisor could tell."""
    return f"{get_log_folder(folder)}/{name}.out"


def _script(cpus: int, order: Mapping[str, Any], site: Site) -> str:
    """A supervisor on every node, told its order on standard input: neither argv nor environment shows a token.

    srun takes --cpus-per-task from no variable since Slurm 22.05. The script's code is what sbatch's job ends with.
    Slurm's warning comes to the shell alone, as it would end the ranks; a shell hears it where it waits, and only then.
    Its SIGTERM comes to all: the supervisors have their run save, and the script waits for them.
    """
    text = base64.b64encode(json.dumps(order).encode()).decode()
    told = "\n".join(text[begin : begin + LINE_WIDTH] for begin in range(0, len(text), LINE_WIDTH))
    srun = f"srun --ntasks-per-node=1 --cpus-per-task={cpus} --kill-on-bad-exit=0 {shlex.quote(site.python)}"
    warned = f'{shlex.quote(f"{site.folder}/runs")}/"$SLURM_JOB_ID.{END_WARNING_SUFFIX}"'
    return f"""#!/bin/sh
warned={warned}
trap 'touch "$warned"' USR1
trap : TERM
{srun} -m workers.slurm <<'{END_OF_ORDER}' &
{told}
{END_OF_ORDER}
while wait $!; code=$?; kill -0 $! 2>/dev/null; do :; done
wait $!; last=$?  # where the warning came as it ended; 127: its code is known
[ $last -eq 127 ] || code=$last
exit $code
"""


def _warning_s(time_limit: str | None, save_s: float) -> int:
    """How long before its end a run is warned."""
    most = min(MOST_WARNING_S, max(1, round(save_s)))
    if time_limit is None:
        return most
    days, _, clock = time_limit.rpartition("-")
    hours, minutes, seconds = map(int, clock.split(":"))
    limit_s = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    return max(1, min(most, limit_s // SHARE_TO_SAVE))


class Site(NamedTuple):
    """`folder` and `python` are those of all its nodes; `board` is where they reach us, and `ca_file` has certificates
    that they trust us by, "" for their own. `login` is a login node, "" for this machine; `ssh_config` the way there.
    """

    folder: str
    python: str
    board: str
    login: str = ""
    ssh_config: str = ""
    ca_file: str = ""

    def certificates(self) -> str:
        """PEM, "" for those that the nodes have. Raises OSError."""
        return Path(self.ca_file).read_text() if self.ca_file else ""


def get_site() -> Site | None:
    """As MESHBOARD_SLURM_ variables name it."""
    return None if settings.SLURM is None else Site(**settings.SLURM)
