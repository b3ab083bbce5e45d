"""What `make up` keeps of its board: secrets and a port, and with them the settings of web, controller and recorder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from webapp import places

GIVEN = ("MESHBOARD_SECRET_KEY", "MESHBOARD_REDIS_URL")  # or a file with it


def kept_settings(state: Path) -> dict[str, str]:
    """Raises OSError: no board was ever started there, or it is somebody else's."""
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


def adopt() -> None:
    """For a command that nobody gave a key or a Redis: the settings of the board that `make up` keeps, if it does."""
    if any(os.environ.get(name) or os.environ.get(f"{name}_FILE") for name in GIVEN):
        return
    state = Path(os.environ.get("MESHBOARD_STATE_DIR") or places.state()).resolve()
    try:
        kept = kept_settings(state)
    except OSError:
        return
    os.environ.update({name: value for name, value in kept.items() if not os.environ.get(name)})
    print(f"meshboard: using the settings of the board that `make up` stored in {state}", file=sys.stderr)
