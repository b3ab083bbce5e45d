"""A secret of the environment, which may lie in a file instead: no `docker inspect` or `ps e` shows that."""

from __future__ import annotations

import os
from pathlib import Path


class SecretError(RuntimeError):
    """What names a secret's file is senseless; holds nothing of what lies there."""


def in_file(name: str) -> str | None:
    """What the file holds that `NAME_FILE` names; None where it names none.

    Raises:
        SecretError: it is not to be had, or `NAME` is set as well.
    """
    path = os.environ.get(f"{name}_FILE", "")
    if not path:
        return None
    if os.environ.get(name):
        raise SecretError(f"{name} and {name}_FILE are both set. Unset one of them.")
    try:
        text = Path(path).read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        raise SecretError(
            f"{name}_FILE is {path!r}, which cannot be read: {getattr(error, 'strerror', 'not UTF-8 text')}"
        ) from None
    if not text:
        raise SecretError(f"{name}_FILE is {path!r}, which is empty.")
    return text
