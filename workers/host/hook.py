"""Environment variables with which every Python process that a command starts can meter itself."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from workers.host.isolation import PACKAGE_ROOT

NOT_METERED_NOTE = (
    "No rank is metered: no process called init_process_group or trained, or Python ran with -S, -I, -E, or another "
    "PYTHONPATH."
)
HOOK_FOLDER = PACKAGE_ROOT / "workers" / "meter" / "hook"


def build_hook_variables(telemetry_socket: Path, python_paths: Iterable[str] = ()) -> dict[str, str]:
    """Return the variables of `workers.meter.hook`.

    Args:
        python_paths: folders of PYTHONPATH after that of the hook.
    """
    return {
        "PYTHONPATH": os.pathsep.join([str(HOOK_FOLDER), *python_paths]),
        "MESHBOARD_TELEMETRY": str(telemetry_socket),
        # The user's Python may not have pydantic and msgpack, which the meter needs.
        "MESHBOARD_METER_PACKAGES": sysconfig.get_path("purelib"),
    }
