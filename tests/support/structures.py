"""Change the structure of valid input: replace, remove, add, copy, and reorder values."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from random import Random
from typing import Any

Path = tuple[Any, ...]

DEEP: Any = 1
for _ in range(25):
    DEEP = [DEEP]
# Values of each JSON type, and those that cost other code an exception. JSON of Python contains NaN and infinity.
WRONG: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 7, 2**31, 2**63, 2**64, 10**30, 10**400, 0.5, -0.5, 1e-300, 1e308),
    *(float("nan"), float("inf"), "", "x", "7", "\ud800", "a\x00b", "x" * 5000, "٢", "💥", "$X", "0001-01-01"),
    *([], [1], [[]], [None], {}, {"a": 1}, {"": None}, {"\ud800": 1}, {"x" * 300: 1}, DEEP),
]


def list_paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the paths of all values inside a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from list_paths(inner, (*path, key))


def get_value(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def replace(value: Any, path: Path, new: Any) -> Any:
    """Return a copy with one value replaced."""
    changed = copy.deepcopy(value)
    get_value(changed, path[:-1])[path[-1]] = new
    return changed


def change_structure(draw: Random, value: Any) -> Any:
    """Return a copy with one to three changes."""
    changed = copy.deepcopy(value)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        if paths := list(list_paths(changed)):
            _change_once(draw, changed, paths)
    return changed


def _change_once(draw: Random, changed: Any, paths: list[Path]) -> None:
    path = draw.choice(paths)
    target = get_value(changed, path[:-1])
    kind = draw.random()
    if kind < 0.7:
        target[path[-1]] = copy.deepcopy(draw.choice(WRONG))
    elif kind < 0.8:
        del target[path[-1]]
    elif kind < 0.9:
        target[path[-1]] = copy.deepcopy(get_value(changed, draw.choice(paths)))
    elif isinstance(target, dict):
        target[draw.choice(("new", "", "\ud800", "0", "x" * 200))] = copy.deepcopy(draw.choice(WRONG))
    else:
        draw.shuffle(target)
        target.extend(copy.deepcopy(target[:2]))


def change_bytes(draw: Random, data: bytes) -> bytes:
    """Return data with one to eight bytes or sections replaced, removed, repeated, or cut."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4, 8))):
        if not changed:
            break
        place, kind = draw.randrange(len(changed)), draw.random()
        if kind < 0.5:
            changed[place] = draw.choice((0, 1, 0x30, 0x37, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        elif kind < 0.65:
            number = draw.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1))
            size = draw.choice((2, 4, 8))
            changed[place : place + size] = number.to_bytes(8, "little")[:size]
        elif kind < 0.75:
            del changed[place : place + draw.randrange(1, 40)]
        elif kind < 0.85:
            start = draw.randrange(len(changed))
            changed[place:place] = changed[start : start + draw.randrange(1, 600)]
        elif kind < 0.9:
            del changed[place:]
        else:
            changed[place : place + 12] = draw.choice(
                (b"7777777777\0\0", b"-1\0", b"99999999999", b"\x80" + b"\xff" * 11)
            )
    return bytes(changed)
