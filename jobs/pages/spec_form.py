"""The submit form's flat text fields, to a nested spec and back. Meaning is checked by `planner.spec` alone."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from planner.choices import DEGREES
from planner.kinds import KINDS
from planner.layout import SCHEDULE_NAMES
from planner.models import parameter_count
from planner.precision import MIXES
from planner.presets import PRESETS, expand_preset
from planner.spec import Layout, Problem, Resources, TrainSpec

DEFAULT_PRESET = "gpt-tiny"
_CHECKBOXES = (
    "layout.sequence_parallel",
    "layout.regather",
    "layout.scatter_gather",
    "train.compile",
    "model.tied_embeddings",
    "train.dropout",
)
_YES_NO = ("train.overlap",)
_OPTIONAL = ("train.resume", "train.tokenizer", "resources.host")
_SIZES = (
    "arch",
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "ffn_hidden_size",
    "vocab_size",
    "max_seq_len",
    "tied_embeddings",
)
_TEXT = (
    "name",
    "model.preset",
    "model.arch",
    "layout.schedule",
    "layout.balance",
    "layout.cp_method",
    "layout.recompute",
    "train.precision",
    "train.attention",
    "train.data",
    "train.column",
    "train.tokenizer",
    "train.resume",
    "resources.device",
)
_FIELDS = (
    "name",
    "model.preset",
    *(f"model.{size}" for size in _SIZES),
    *(f"layout.{field}" for field in Layout.model_fields),
    *(f"train.{field}" for field in TrainSpec.model_fields),
    *(f"resources.{field}" for field in Resources.model_fields),
)
_MORE = (
    "layout.cp",
    "layout.ep",
    "layout.dp_replicas",
    "layout.regather",
    "layout.scatter_gather",
    "layout.balance",
    "train.compile",
    "train.attention",
    "train.overlap",
    "train.dropout",
)
_FLOATS = tuple(f"train.{name}" for name, field in TrainSpec.model_fields.items() if field.annotation is float)
_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")

_DEGREES = [(str(degree), str(degree)) for degree in DEGREES]
_OPTIONS: dict[str, list[tuple[str, str]]] = {
    "layout.dp": _DEGREES,
    "layout.pp": _DEGREES,
    "layout.tp": _DEGREES,
    "layout.cp": _DEGREES,
    "layout.ep": _DEGREES,
    "layout.zero": [("0", "0 · plain DDP"), ("1", "1"), ("2", "2"), ("3", "3")],
    "layout.schedule": list(SCHEDULE_NAMES.items()),
    "layout.balance": [("layers", "by layers"), ("cost", "by cost")],
    "layout.recompute": [("none", "none"), ("selective", "selective"), ("full", "full")],
    "layout.cp_method": [("ring", "ring"), ("all_gather", "all-gather")],
    "model.arch": [("gpt", "GPT"), ("llama", "Llama")],
    "train.precision": [(name, name.replace("_", " ")) for name in MIXES],
    "train.attention": [("fused", "fused"), ("unfused", "unfused")],
    "train.overlap": [("true", "while backward runs"), ("false", "afterwards")],
    "resources.device": [("cpu", "CPU"), ("cuda", "GPU")],
}


def spec_from_form(form: Mapping[str, str]) -> dict[str, Any]:
    """The nested, untrusted spec a form asks for, ready for `parse_spec`.

    What does not read as a number stays text, so that the parser refuses it by its field. Fields left out keep
    the spec's defaults. A preset named by the form wins over the sizes beside it.
    """
    spec: dict[str, Any] = {}
    preset = form.get("model.preset", "")
    for name in _FIELDS:
        if preset and name.startswith("model.") and name != "model.preset":
            continue
        if name in _CHECKBOXES:
            _put(spec, name, form.get(name) in ("true", "on"))
        elif name in _YES_NO and form.get(name) in ("true", "false"):
            _put(spec, name, form[name] == "true")
        elif name == "model.preset":
            _put(spec, name, preset or None)
        elif name in _OPTIONAL:
            _put(spec, name, form.get(name, "").strip() or None)
        elif name in form:
            _put(spec, name, form[name] if name in _TEXT else _number(form[name], whole=name not in _FLOATS))
    kind = form.get("kind", "")
    if any(name == kind and other.one_slot for name, other in KINDS.items()):
        spec |= {
            "kind": kind,
            "dry_ranks": [_number(r, whole=True) for r in form.get("dry_ranks", "0").split(",")],
        }
    return spec


def values_from_spec(spec: object) -> dict[str, str]:
    """The form's values for a spec, which may be incomplete or wrong; what it lacks has its default."""

    def section(name: str) -> dict[str, Any]:
        found = spec.get(name) if isinstance(spec, Mapping) else None
        return dict(found) if isinstance(found, Mapping) else {}

    model = section("model") or {"preset": DEFAULT_PRESET}
    whole = {
        "name": spec.get("name", "untitled") if isinstance(spec, Mapping) else "untitled",
        "model": {**expand_preset({"preset": DEFAULT_PRESET}), "preset": None, **expand_preset(model)},
        "layout": {**Layout().model_dump(), **section("layout")},
        "train": {**TrainSpec().model_dump(), **section("train")},
        "resources": {**Resources().model_dump(), **section("resources")},
    }
    ranks = spec.get("dry_ranks") if isinstance(spec, Mapping) else None
    values = {name: _text(_get(whole, name)) for name in _FIELDS}
    return values | {"dry_ranks": ", ".join(map(_text, ranks)) if isinstance(ranks, list) else "0"}


def options_for(values: Mapping[str, str]) -> dict[str, list[tuple[str, str]]]:
    """The choices of each segmented field; a value none of them offers (set over REST) is offered too."""
    options = {}
    for name, offered in _OPTIONS.items():
        current = values.get(name, "")
        known = any(value == current for value, _ in offered)
        options[name] = offered if known or not current else [*offered, (current, current)]
    return options


def uses_more_options(values: Mapping[str, str]) -> bool:
    """Whether a field of the folded part of the form differs from its default."""
    usual = values_from_spec(None)
    return any(values[name] != usual[name] for name in _MORE)


def errors_by_field(problems: list[Problem]) -> tuple[dict[str, str], list[str]]:
    """Messages for the fields the form has, and lines for the rest."""
    known = {*_FIELDS, "model", "layout", "dry_ranks"}
    beside: dict[str, str] = {}
    other: list[str] = []
    for problem in problems:
        if problem.field in known:
            beside[problem.field] = "; ".join(filter(None, [beside.get(problem.field), problem.message]))
        else:
            other.append(f"{problem.field}: {problem.message}")
    return beside, other


def preset_cards() -> dict[str, dict[str, Any]]:
    """What the page tells about each preset."""
    return {
        name: {
            "description": preset.description,
            "parameters": parameter_count(preset.model),
            "sizes": preset.model.model_dump(include=set(_SIZES)),
        }
        for name, preset in PRESETS.items()
    }


def _number(text: str, *, whole: bool) -> int | float | str:
    if _INTEGER.fullmatch(text.strip()):
        return int(text)
    if whole:
        return text
    try:
        value = float(text)
    except ValueError:
        return text
    return value if math.isfinite(value) else text


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)


def _put(spec: dict[str, Any], name: str, value: object) -> None:
    *path, last = name.split(".")
    for part in path:
        spec = spec.setdefault(part, {})
    spec[last] = value


def _get(spec: Mapping[str, Any], name: str) -> object:
    value: Any = spec
    for part in name.split("."):
        value = value.get(part)
    return value
