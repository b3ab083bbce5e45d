"""Installed commands. Each one names the extra of the package that it needs."""

from __future__ import annotations

import sys
from importlib.util import find_spec

EXTRA_PACKAGES = {"web": "django", "worker": "torch"}  # extra -> package that only this extra installs
EXIT_NOT_INSTALLED = 2


def manage() -> int:
    """Run `meshboard-manage`."""
    if missing := _find_missing("web"):
        return _report_missing("meshboard-manage", missing)
    from webapp.manage import main

    main()
    return 0


def up() -> int:
    """Run `meshboard-up`."""
    if missing := _find_missing("web", "worker"):
        return _report_missing("meshboard-up", missing)
    from webapp.runner import main

    return main()


def _find_missing(*extras: str) -> list[str]:
    return [extra for extra in extras if find_spec(EXTRA_PACKAGES[extra]) is None]


def _report_missing(command: str, missing: list[str]) -> int:
    packages = " and ".join(EXTRA_PACKAGES[extra] for extra in missing)
    are = "are" if len(missing) > 1 else "is"
    print(
        f"{command}: the package {packages} {are} not installed. Run pip install 'meshboard[{','.join(missing)}]'.",
        file=sys.stderr,
    )
    return EXIT_NOT_INSTALLED
