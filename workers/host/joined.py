"""What a machine keeps of having joined: a file that nobody else reads."""

from __future__ import annotations

import json
import os
import secrets
import stat
from pathlib import Path
from typing import NamedTuple

from workers.host.settings import SettingError


class Kept(NamedTuple):
    """`redis_url` and `key` are empty while it has not joined."""

    identity: str
    redis_url: str = ""
    key: str = ""


def kept_file(state_dir: Path, name: str) -> Path:
    return state_dir / "hosts" / f"{name}.json"


def read_or_make(path: Path) -> Kept:
    """An identity is written down before anybody is told of it: who lost the answer asks again as the same.

    Raises:
        SettingError: the file is not what we wrote, or others may read it.
    """
    try:
        mode = path.stat().st_mode
        told = json.loads(path.read_text())
        kept = Kept(**{name: str(told[name]) for name in Kept._fields})
    except FileNotFoundError:
        kept = Kept(secrets.token_urlsafe(32))
        write(path, kept)
        return kept
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingError(f"Cannot read {path}: {error}. Remove it, and join again with a token.") from None
    if stat.S_IMODE(mode) & 0o077:
        raise SettingError(
            f"Other users can read {path} (mode {stat.S_IMODE(mode):03o}). Run chmod 600 on it, or join again."
        )
    return kept


def write(path: Path, kept: Kept) -> None:
    """By rename: nobody reads half of it. Raises SettingError."""
    draft = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            json.dump(kept._asdict(), out)
        draft.replace(path)
    except OSError as error:
        raise SettingError(f"Cannot write {path}: {error}. Check MESHBOARD_STATE_DIR.") from None
