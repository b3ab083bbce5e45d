"""Django's command line, from a checkout (`manage.py`) or an installed wheel (`meshboard-manage`)."""

from __future__ import annotations

import os
import sys

from django.core.management import execute_from_command_line


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webapp.settings")
    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
