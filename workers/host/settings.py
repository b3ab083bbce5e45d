"""A host worker's settings, from the environment and nowhere else. No database, no secret key."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast


class SettingError(RuntimeError):
    """A MESHBOARD_ variable is missing or senseless."""


@dataclass(frozen=True)
class HostSettings:
    """What a host worker knows of itself."""

    redis_url: str
    name: str
    slots: int
    device: Literal["cpu", "cuda"]
    run_dir: Path
    data_root: Path
    checkpoint_root: Path
    script_root: Path
    trainer_module: str


def host_settings() -> HostSettings:
    """Read the environment.

    Raises:
        SettingError: naming the variable.
    """
    env = os.environ
    state = Path(env.get("MESHBOARD_STATE_DIR", "var"))
    redis_url = env.get("MESHBOARD_REDIS_URL")
    if not redis_url:
        raise SettingError("MESHBOARD_REDIS_URL is not set")
    slots = env.get("MESHBOARD_SLOTS", "4")
    if not slots.isascii() or not slots.isdigit() or int(slots) < 1:
        raise SettingError(f"MESHBOARD_SLOTS must be a whole number of at least 1, got {slots!r}")
    device = env.get("MESHBOARD_DEVICE", "cpu")
    if device not in ("cpu", "cuda"):
        raise SettingError(f"MESHBOARD_DEVICE must be cpu or cuda, got {device!r}")
    return HostSettings(
        redis_url=redis_url,
        name=env.get("MESHBOARD_HOST_NAME") or socket.gethostname().split(".")[0],
        slots=int(slots),
        device=cast(Literal["cpu", "cuda"], device),
        run_dir=Path(env.get("MESHBOARD_RUN_DIR", state / "runs")).resolve(),
        data_root=Path(env.get("MESHBOARD_DATA_ROOT", state / "data")).resolve(),
        checkpoint_root=Path(env.get("MESHBOARD_CHECKPOINT_ROOT", state / "checkpoints")).resolve(),
        script_root=Path(env.get("MESHBOARD_SCRIPT_ROOT", state / "scripts")).resolve(),
        # Fault tests train a script of their own, one that ignores signals, say.
        trainer_module=env.get("MESHBOARD_TRAINER_MODULE", "workers.trainer"),
    )
