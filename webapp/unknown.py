"""Variables that look like settings and are none: a name that is a letter off would be ignored without a word."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from webapp.environment import PREFIX, RunnerSettings, WebSettings, is_secret

# Of hosts, of the command, its meter and builds, and of docker-compose.yml, whose `.env` somebody may read whole.
OTHERS = (  # noqa: SIM905 - as a list it has forty lines
    "ADDRESS BASELINE CA CHECKPOINT_ROOT CLIENT DATABASE_MEMORY DATABASE_PASSWORD DATA_ROOT DEVICE GATE_OPTIONS "
    "GPU_HOST_NAME GPU_RUN_DIR GPU_SLOTS GROUP_TIMEOUT_S HOST_KEY HOST_MEMORY HOST_NAME HOST_STATE_DIR HTTPS_PORT "
    "HTTP_PORT JOB_USER JOIN_INSECURE JOIN_TOKEN KEEP_RUNS_BYTES KEEP_RUNS_DAYS LOG_BYTES REDIS_MEMORY "
    "REDIS_PASSWORD RUN RUN_DIR SANDBOX SCRIPT_ROOT SET_BASELINE SLOTS SPEC STREAM_BYTES TLS_DIR TOKEN "
    "PROJECT SUBMIT_OPTIONS TELEMETRY TRAINER_MODULE URL WEB_MEMORY"
).split()
FILES = ["join_token_file", *(f"{name}_file" for name, field in WebSettings.model_fields.items() if is_secret(field))]
KNOWN = {*OTHERS, *(name.upper() for name in (*RunnerSettings.model_fields, *WebSettings.model_fields, *FILES))}


def unknown(names: Iterable[str]) -> list[str]:
    """A sentence for each that nothing reads."""
    return [_told(name.removeprefix(PREFIX)) for name in sorted(names) if _is_unknown(name)]


def _is_unknown(name: str) -> bool:
    return name.startswith(PREFIX) and name.removeprefix(PREFIX) not in KNOWN


def _told(own: str) -> str:
    words = f"{PREFIX}{own} is not a setting, so Meshboard ignores it."
    if own.removesuffix("_FILE") in KNOWN:
        return f"{words} {PREFIX}{own.removesuffix('_FILE')} is not a secret, so it cannot be read from a file."
    alike = difflib.get_close_matches(own, sorted(KNOWN), 1)
    return f"{words} Did you mean {PREFIX}{alike[0]}?" if alike else words
