"""Whether jobs can run on Slurm from here, for `manage.py doctor`."""

from __future__ import annotations

from jobs.engines.slurm.commands import ASK_S, Slurm
from jobs.engines.slurm.door import AwayError, Door
from jobs.engines.slurm.script import logs
from jobs.engines.slurm.site import Site


def problems(site: Site) -> list[str]:
    """What keeps jobs from running there, each with what to do; empty when nothing was found. Takes up to a minute."""
    slurm = Slurm(Door(site.login, site.ssh_config))
    found = []
    try:
        site.certificates()
    except OSError as error:
        found.append(f"MESHBOARD_SLURM_CA_FILE: {error}")
    if site.board.startswith("http:") or "//localhost" in site.board:
        found.append(f"MESHBOARD_SLURM_BOARD: {site.board} is no address that nodes reach over HTTPS")
    try:
        slurm.jobs()
        slurm.make(logs(site.folder))
        python = slurm.door.run([site.python, "-c", "import torch, workers.slurm"], deadline_s=ASK_S)
    except AwayError as error:
        return [*found, str(error)]
    if python.code:
        found.append(f"MESHBOARD_SLURM_PYTHON: {site.python} lacks Meshboard: {python.complaint}")
    return found
