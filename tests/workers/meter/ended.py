"""Run the meter in a forked rank as `python -m workers.meter` does, including the exit of the process."""

from __future__ import annotations

from workers.meter.__main__ import main as metered
from workers.meter.rank_exit import run_and_exit


def main() -> None:
    run_and_exit(metered)
