"""Django's command line, from a checkout (`manage.py`) or an installed wheel (`meshboard-manage`)."""

from __future__ import annotations

import os
import sys

from django.core.exceptions import ImproperlyConfigured
from django.core.management import execute_from_command_line

from webapp.installation import adopt_stored_settings


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webapp.settings")
    adopt_stored_settings()
    try:
        execute_from_command_line(sys.argv)
    except ImproperlyConfigured as error:
        sys.exit(f"meshboard: invalid settings (see docs/howto/deploy.md):\n{error}")


if __name__ == "__main__":
    main()
