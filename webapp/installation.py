"""Folders of a checkout or an installed wheel, and the settings that `make up` stores."""

from __future__ import annotations

import os
import sys
from pathlib import Path

REQUIRED_VARIABLES = ("MESHBOARD_SECRET_KEY", "MESHBOARD_REDIS_URL")  # or variables that end with _FILE
PACKAGE = Path(__file__).resolve().parent
CHECKOUT = PACKAGE.parent
IS_CHECKOUT = (CHECKOUT / "manage.py").exists()


def get_templates_dir() -> Path:
    """Return the folder of the templates."""
    return CHECKOUT / "templates" if IS_CHECKOUT else PACKAGE / "templates"


def get_documentation_dir() -> Path:
    """Return the folder of the documentation site. It exists after `make docs`."""
    return CHECKOUT / "docs" / "site" if IS_CHECKOUT else PACKAGE / "documentation"


def get_default_state_dir() -> Path:
    """Return the default of MESHBOARD_STATE_DIR, which is never inside installed packages."""
    if IS_CHECKOUT:
        return CHECKOUT / "var"
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "meshboard"


def read_stored_settings(state: Path) -> dict[str, str]:
    """Return the settings of web, controller, and recorder that `make up` stores in a state folder.

    Raises:
        OSError: No board was started there, or the files belong to another user.
    """
    key, password, port = (
        (state / name).read_text().strip() for name in ("secret_key", "redis_password", "redis_port")
    )
    return {
        "MESHBOARD_STATE_DIR": str(state),
        "MESHBOARD_SECRET_KEY": key,
        "MESHBOARD_ALLOWED_HOSTS": "127.0.0.1,localhost",
        "MESHBOARD_REDIS_URL": f"redis://:{password}@127.0.0.1:{port}/0",
        "MESHBOARD_CHECKPOINT_ROOT": str(state / "checkpoints"),
        "MESHBOARD_DATA_ROOT": str(state / "data"),
        "MESHBOARD_SCRIPT_ROOT": str(state / "scripts"),
        "MESHBOARD_HTTPS": "0",
    }


def adopt_stored_settings() -> None:
    """Use the settings that `make up` stored if neither a secret key nor a Redis is set."""
    if any(os.environ.get(name) or os.environ.get(f"{name}_FILE") for name in REQUIRED_VARIABLES):
        return
    state = Path(os.environ.get("MESHBOARD_STATE_DIR") or get_default_state_dir()).resolve()
    try:
        stored = read_stored_settings(state)
    except OSError:
        return
    os.environ.update({name: value for name, value in stored.items() if not os.environ.get(name)})
    print(f"meshboard: using the settings of the board that `make up` stored in {state}", file=sys.stderr)
