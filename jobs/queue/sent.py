"""A spec as it is sent to hosts, of which one may be of the version before and refuses fields that it does not know."""

from __future__ import annotations

from typing import Any

ONLY_THE_BOARDS = ("project", "run", "retry", "after", "after_failed")  # no host reads them
OF_RESOURCES = ("max_hosts", "pool", "labels")
# Fields of this version, and where each says nothing: whoever does not know it does the same without.
NEW: dict[str, dict[str, Any]] = {
    "layout": {"keep_gathered": False},
    "train": {"document_end": None},
    "model": {"head_dim": None, "sliding_window": None},
    "model.moe": {"expert_bias": False, "swiglu_limit": None},
    "resources": {"software": None},
}


def spec_for_hosts(spec: dict[str, Any]) -> dict[str, Any]:
    """Without what only the board reads, and without what is new and not used."""
    told = {name: value for name, value in spec.items() if name not in ONLY_THE_BOARDS}
    if "resources" in told:
        told["resources"] = {name: value for name, value in spec["resources"].items() if name not in OF_RESOURCES}
    for group, unused in NEW.items():
        told = _without(told, group.split("."), unused)
    return told


def _without(part: dict[str, Any], path: list[str], unused: dict[str, Any]) -> dict[str, Any]:
    """A copy in which what lies at the path says nothing that it says by being left out."""
    if not path:
        return {name: value for name, value in part.items() if not (name in unused and value == unused[name])}
    name, *rest = path
    return {**part, name: _without(part[name], rest, unused)} if part.get(name) else part
