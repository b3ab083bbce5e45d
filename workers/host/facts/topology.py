"""How GPUs reach each other, from `nvidia-smi topo -m`: a table of words, as its driver knows the board."""

from __future__ import annotations

import logging
import re
import subprocess

from contracts.hosts import GpuLink

log = logging.getLogger(__name__)

PATIENCE_S = 30.0
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
GPU = re.compile(r"GPU(\d+)")
WORD = re.compile(r"[A-Z0-9]{1,8}")


def links() -> list[GpuLink]:
    """Of every pair of GPUs; none where the program is not there or fails."""
    try:
        ran = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=PATIENCE_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.debug("no topology: %s", error)
        return []
    return read(ran.stdout)


def read(table: str) -> list[GpuLink]:
    """Each pair once. The first line names the columns, GPUs and NICs; every other begins with its own name."""
    lines = [words for line in table.splitlines() if (words := COLOURS.sub("", line).split())]
    header = lines[0] if lines else []
    columns = [(place, int(name[3:])) for place, name in enumerate(header) if GPU.fullmatch(name)]
    found = []
    for words in lines:
        row = GPU.fullmatch(words[0])
        if words is header or row is None:
            continue
        for place, b in columns:
            a, kind = int(row[1]), words[place + 1] if place + 1 < len(words) else ""
            if a < b and WORD.fullmatch(kind):
                found.append(GpuLink(a=a, b=b, kind=kind))
    return found
