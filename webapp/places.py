"""Where files that are no modules lie: in a checkout beside the packages, in an installed wheel inside this one."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
CHECKOUT = PACKAGE.parent
IN_CHECKOUT = (CHECKOUT / "manage.py").exists()


def templates() -> Path:
    return CHECKOUT / "templates" if IN_CHECKOUT else PACKAGE / "templates"


def documentation() -> Path:
    """The site that `make docs` builds; it need not be there."""
    return CHECKOUT / "docs" / "site" if IN_CHECKOUT else PACKAGE / "documentation"


def state() -> Path:
    """Where state goes unless MESHBOARD_STATE_DIR says otherwise: never beside installed packages."""
    if IN_CHECKOUT:
        return CHECKOUT / "var"
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "meshboard"
