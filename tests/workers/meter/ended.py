"""The meter as `python -m workers.meter` runs it, for ranks that are forked: to the end of the process."""

from __future__ import annotations

from workers.meter.__main__ import main as metered
from workers.meter.rank_exit import run_and_exit


def main() -> None:
    run_and_exit(metered)
