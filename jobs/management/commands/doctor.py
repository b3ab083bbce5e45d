"""Check the board and print how to fix problems."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from contracts.doctor import format_findings, format_findings_as_json, get_exit_code
from jobs.queue.hosts.checks import check_board
from jobs.queue.slurm import commands as slurm
from jobs.queue.slurm.script import get_site


class Command(BaseCommand):
    help = (
        "Check all parts of the board, such as Redis, database, controller, and hosts, and print how to fix problems."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print JSON")

    def handle(self, *args: Any, **options: Any) -> None:
        findings = list(check_board())
        if (site := get_site()) is not None:
            findings += slurm.check_site(site)
        self.stdout.write(format_findings_as_json(findings) if options["json"] else format_findings(findings))
        if code := get_exit_code(findings):
            sys.exit(code)
