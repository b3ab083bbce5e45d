"""Check whether jobs can run on Slurm from this server, for `manage.py doctor`."""

from __future__ import annotations

from collections.abc import Iterator

from contracts.doctor import Finding
from jobs.queue.engines.slurm.commands import ASK_S, AwayError, Door, Slurm
from jobs.queue.engines.slurm.script import logs
from jobs.queue.engines.slurm.site import Site
from jobs.queue.engines.slurm.states import name_of

SUBJECT = "Slurm"


def findings(site: Site) -> Iterator[Finding]:
    """What keeps jobs from running there, and what of them could not be told. Takes up to a minute."""
    slurm = Slurm(Door(site.login, site.ssh_config))
    try:
        site.certificates()
    except OSError as error:
        yield Finding(
            "fail",
            SUBJECT,
            f"Cannot read MESHBOARD_SLURM_CA_FILE: {error}",
            "Set MESHBOARD_SLURM_CA_FILE to a file of certificates, or unset MESHBOARD_SLURM_CA_FILE.",
        )
    if site.board.startswith("http:") or "//localhost" in site.board:
        words = f"MESHBOARD_SLURM_BOARD is {site.board}, which is not an HTTPS address that nodes can reach"
        yield Finding(
            "fail", SUBJECT, words, "Set MESHBOARD_SLURM_BOARD to the https:// address at which nodes reach the board."
        )
    try:
        slurm.jobs()
        slurm.make(logs(site.folder))
        python = slurm.door.run([site.python, "-c", "import torch, workers.slurm"], deadline_s=ASK_S)
        if python.code:
            words = f"MESHBOARD_SLURM_PYTHON is {site.python}, which cannot import Meshboard: {python.complaint}"
            yield Finding("fail", SUBJECT, words, "Install Meshboard for this Python: pip install '.[worker]'")
        yield _accounts(slurm)
    except AwayError as error:
        yield Finding(
            "fail", SUBJECT, str(error), "Run the command by hand as the user of the board. See docs/howto/slurm.md."
        )


def _accounts(slurm: Slurm) -> Finding:
    """Raises AwayError."""
    if slurm.remembered([name_of("doctor", 1)]) is not None:
        return Finding("ok", SUBJECT, "Slurm accounting (sacct) is on")
    words = "Slurm accounting (sacct) is off, so Meshboard may not learn why a Slurm job ended"
    return Finding("warn", SUBJECT, words, "Set AccountingStorageType=accounting_storage/slurmdbd in slurm.conf.")
