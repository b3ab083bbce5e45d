"""Whether jobs can run on Slurm from here, for `manage.py doctor`."""

from __future__ import annotations

from collections.abc import Iterator

from contracts.findings import Finding
from jobs.engines.slurm.commands import ASK_S, Slurm
from jobs.engines.slurm.door import AwayError, Door
from jobs.engines.slurm.rows import name_of
from jobs.engines.slurm.script import logs
from jobs.engines.slurm.site import Site

SUBJECT = "Slurm"


def findings(site: Site) -> Iterator[Finding]:
    """What keeps jobs from running there, and what of them could not be told. Takes up to a minute."""
    slurm = Slurm(Door(site.login, site.ssh_config))
    try:
        site.certificates()
    except OSError as error:
        yield Finding("fail", SUBJECT, f"MESHBOARD_SLURM_CA_FILE: {error}", "name a file of certificates, or none")
    if site.board.startswith("http:") or "//localhost" in site.board:
        words = f"MESHBOARD_SLURM_BOARD: {site.board} is no address that nodes reach over HTTPS"
        yield Finding("fail", SUBJECT, words, "give the https:// address of the board as nodes reach it")
    try:
        slurm.jobs()
        slurm.make(logs(site.folder))
        python = slurm.door.run([site.python, "-c", "import torch, workers.slurm"], deadline_s=ASK_S)
        if python.code:
            words = f"MESHBOARD_SLURM_PYTHON: {site.python} lacks Meshboard: {python.complaint}"
            yield Finding("fail", SUBJECT, words, "install it there: pip install '.[worker]'")
        yield _accounts(slurm)
    except AwayError as error:
        yield Finding("fail", SUBJECT, str(error), "run it by hand as the board's user; see docs/howto/slurm.md")


def _accounts(slurm: Slurm) -> Finding:
    """Raises AwayError."""
    if slurm.remembered([name_of("doctor", 1)]) is not None:
        return Finding("ok", SUBJECT, "its accounts (sacct) tell how a job ended that slurmctld has forgotten")
    words = "it keeps no accounts: of a job that ends while the controller is away for MinJobAge, nobody knows how"
    return Finding("warn", SUBJECT, words, "AccountingStorageType=accounting_storage/slurmdbd in slurm.conf")
