"""A checkpoint that another host lends: rank 0 is told where, by a file beside the telemetry's socket."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from contracts.control import Loan, ResumeCheckpoint
from contracts.names import LOAN_FILE
from workers.host.settings import JobUser
from workers.host.supervisor.line import GangLine, LineError, Ready

LOOK_S = 0.5


async def hand_over(line: GangLine, kept: ResumeCheckpoint, folder: Path, user: JobUser | None) -> None:
    """Once its host has said where it lends."""
    while (at := await _asked(line, kept["host"])) is None:
        await asyncio.sleep(LOOK_S)
    _leave(folder, Loan(host=kept["host"], address=at.address, port=at.port, secret=kept["lent"]), user)


async def _asked(line: GangLine, host: str) -> Ready | None:
    try:
        return await line.lent_at(host)
    except LineError:
        return None


def _leave(folder: Path, loan: Loan, user: JobUser | None) -> None:
    """By rename, and for the job's user alone: others may pass the folder."""
    draft = folder / f".{LOAN_FILE}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w") as out:
        json.dump(loan, out)
        if user is not None:
            os.fchown(descriptor, user.uid, user.gid)
    draft.replace(folder / LOAN_FILE)
