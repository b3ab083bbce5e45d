"""Specs as YAML or JSON, from a file or from standard input, with fields set on the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from meshboard import yaml12
from meshboard.errors import WrongError, why

NO_MAPPING = {type(None): "empty", list: "a list", str: "text"}


class FileError(WrongError):
    """What cannot be read, in words that name the file or the field."""


def spec(name: str, changes: Sequence[str] = ()) -> dict[str, Any]:
    """The spec in a file (`-`: standard input), each `layout.dp=2` of `changes` set in it.

    Raises:
        FileError: it cannot be read, or is no mapping.
    """
    try:
        found = yaml12.read(read(name))
    except (OSError, ValueError) as error:
        raise FileError(f"{name}: {why(error)}") from None
    except WrongError as error:
        raise FileError(f"{name}: {error}", error.field, error.pointer) from None
    except yaml.YAMLError as error:
        raise FileError(f"{name} is neither YAML nor JSON: {_one_line(error)}") from None
    if not isinstance(found, dict):
        raise FileError(f"{name}: The spec is {NO_MAPPING.get(type(found), 'a single value')}. Use a mapping.")
    for change in changes:
        _set(found, change)
    return found


def read(name: str) -> bytes:
    """A file, or `-`: standard input. Its encoding is the reader's to know, not this machine's locale.

    Raises:
        OSError
    """
    if name != "-":
        return Path(name).read_bytes()
    if sys.stdin is None:
        raise OSError("standard input is closed")
    return sys.stdin.buffer.read()


def _set(found: dict[str, Any], change: str) -> None:
    path, equals, value = change.partition("=")
    if not equals or not all(path.split(".")):
        raise FileError(f"--set {change!r}: Use FIELD=VALUE, such as layout.dp=2.")
    *above, name = path.split(".")
    for part in above:
        found = found.setdefault(part, {})
        if not isinstance(found, dict):
            raise FileError(f"--set {change!r}: {part!r} is a single value, so it has no fields.")
    try:
        found[name] = yaml12.read(value, path)
    except yaml.YAMLError as error:
        raise FileError(f"--set {change!r}: {_one_line(error)}", path) from None
    except WrongError as error:
        raise FileError(f"--set {change!r}: {error}", error.field, error.pointer) from None


def _one_line(error: yaml.YAMLError) -> str:
    return " ".join(str(error).split())
