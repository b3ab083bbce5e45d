"""Which fields there are where somebody named one that there is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel

MANY = 12  # of more fields those alone are named that look like the one that was given, if any do


def known_words(model: type[BaseModel], place: Sequence[object]) -> str:
    """What may stand at a place of a model instead of its last part, in words; empty where that cannot be told."""
    *outer, given = place
    found: type[BaseModel] | None = model
    for part in outer:
        if isinstance(part, int) or found is None:
            continue
        field = found.model_fields.get(str(part))
        found = next(_models(field.annotation), None) if field else None
    if found is None or not found.model_fields:
        return ""
    names = list(found.model_fields)
    like = get_close_matches(str(given)[:100], names) if len(names) > MANY else []
    *others, last = like or names
    return f"{'Similar fields' if like else 'Fields'}: {', '.join([*others, last])}."


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Those within a type: of a union, a list, what may be absent."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)
