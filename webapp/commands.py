"""The installed commands, each of which says which extra of the package it lacks: an install of any has them all."""

from __future__ import annotations

import sys
from importlib.util import find_spec

BROUGHT = {"web": "django", "worker": "torch"}  # extra: what it alone brings
NOT_INSTALLED = 2


def manage() -> int:
    if lacking := _lacking("web"):
        return _told("meshboard-manage", lacking)
    from webapp.manage import main

    main()
    return 0


def up() -> int:
    if lacking := _lacking("web", "worker"):
        return _told("meshboard-up", lacking)
    from webapp.runner import main

    return main()


def _lacking(*extras: str) -> list[str]:
    return [extra for extra in extras if find_spec(BROUGHT[extra]) is None]


def _told(command: str, lacking: list[str]) -> int:
    packages = " and ".join(BROUGHT[extra] for extra in lacking)
    are = "are" if len(lacking) > 1 else "is"
    print(
        f"{command}: the package {packages} {are} not installed. Run pip install 'meshboard[{','.join(lacking)}]'.",
        file=sys.stderr,
    )
    return NOT_INSTALLED
