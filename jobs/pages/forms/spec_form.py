"""The submit form: what it has of a job spec, and the words of its choices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from django.utils.datastructures import MultiValueDict

from jobs.pages.forms import derived, engines, software, turn_form
from planner.facts.kinds import KINDS
from planner.facts.layout import SCHEDULE_NAMES
from planner.facts.models.presets import PRESETS, expand_preset
from planner.facts.models.shapes import parameter_count
from planner.facts.resources import Resources, SlurmSpec
from planner.facts.spec import JobSpec, Layout, ModelSpec, Problem, TrainSpec
from planner.hardware.stacks import STACKS
from planner.search.auto import AutoSpec
from planner.search.choices import DEGREES

DEFAULT_PRESET = "gpt-tiny"
_DRY = derived.fields_of("", JobSpec, only=["dry_ranks"])
_RANKS = derived.fields_of("layout.auto", AutoSpec, only=["ranks"])
_AUTO = _RANKS | {f"layout.auto.{name}": derived.KEPT for name in AutoSpec.model_fields if name != "ranks"}
PARTS = {f"model.{name}": derived.KEPT for name in ("moe", "mla", "rope_scaling")}
_MODEL = derived.fields_of("model", ModelSpec)
FIELDS = (
    derived.fields_of("", JobSpec, only=["name"])
    | _MODEL
    | derived.fields_of("layout", Layout)
    | derived.fields_of("train", TrainSpec)
    | derived.fields_of("resources", Resources)
    | derived.fields_of("resources.slurm", SlurmSpec)
    | software.FIELDS
    | turn_form.FIELDS
)
_SIZES = {name.removeprefix("model.") for name in _MODEL} - {"preset"}
_DEGREES = {str(degree): str(degree) for degree in DEGREES}
_WORDS: dict[str, Mapping[str, str]] = {
    **dict.fromkeys(("layout.dp", "layout.pp", "layout.tp", "layout.cp", "layout.ep"), _DEGREES),
    "layout.zero": {"0": "0 · DDP", "1": "1", "2": "2", "3": "3"},
    "layout.schedule": dict(SCHEDULE_NAMES),
    "layout.balance": {"layers": "by layers", "cost": "by cost"},
    "resources.stack": {name: stack.title for name, stack in STACKS.items()},
    "layout.cp_method": {"all_gather": "all-gather"},
    "model.arch": {"gpt": "GPT", "llama": "Llama"},
    "train.on_not_finite": {"stop": "ends the run", "continue": "goes on"},
    "train.verify": {"auto": "where it takes seconds", "on": "yes", "off": "no"},
    "train.sampling": {"random": "from anywhere", "epochs": "each once an epoch"},
    "train.overlap": {"true": "while backward runs", "false": "afterwards"},
    "resources.device": {"cpu": "CPU", "cuda": "GPU"},
    "resources.engine": engines.WORDS,
    **software.WORDS,
    **turn_form.WORDS,
}
# The folded parts of the form. What differs in the first from its default changes what is planned: it starts open.
_FOLDS: dict[str, tuple[str, ...]] = {
    "axes": (
        *("layout.cp", "layout.cp_method", "layout.ep", "layout.balance", "layout.dp_replicas", "layout.regather"),
        *(
            "layout.keep_gathered",
            "layout.scatter_gather",
            "train.attention",
            "train.overlap",
            "train.compile",
            "train.dropout",
        ),
        "resources.stack",
        *software.FIELDS,
    ),
    "training": (
        *("train.learning_rate", "train.warmup_steps", "train.weight_decay", "train.grad_clip", "train.eval_every"),
        *("train.seed", "train.on_not_finite", "train.verify"),
    ),
    "data": (
        *("train.data", "train.column", "train.tokenizer", "train.sampling", "train.document_end"),
        *("train.checkpoint_every", "train.keep_checkpoints", "train.resume"),
    ),
    "turn": (
        *("resources.host", "resources.engine", *turn_form.FIELDS),
        *(name for name in FIELDS if name.startswith("resources.slurm.")),
    ),
    "dry": ("dry_ranks",),
}
_STARTS_OPEN = ("axes",)


class Folds(NamedTuple):
    """Parts of the form by name: those that differ from their defaults, and those that are open."""

    changed: list[str]
    open: list[str]


def spec_from_form(form: MultiValueDict[str, str]) -> dict[str, Any]:
    """The untrusted spec a form asks for. A preset named by the form wins over the sizes beside it."""
    spec = software.without_others(engines.without_others(derived.spec_from(FIELDS | PARTS, form)))
    preset = form.get("model.preset")
    if preset:
        spec["model"] = {"preset": preset}
    if form.get("auto") in derived.YES:
        spec["layout"] = {"auto": _given(derived.spec_from(_AUTO, form))}
    kind = form.get("kind")
    if any(name == kind and other.one_slot for name, other in KINDS.items()):
        spec |= {"kind": kind, **derived.spec_from(_DRY, form)}
    return spec


def _given(spec: dict[str, Any]) -> dict[str, Any]:
    """The constraints that were filled in."""
    auto = spec.get("layout", {}).get("auto", {})
    return {name: value for name, value in auto.items() if value is not None}


def values_from_spec(spec: object) -> dict[str, Any]:
    """The form's values for a spec, which may be incomplete or wrong; what it lacks has its default."""
    whole = dict(spec) if isinstance(spec, Mapping) else {}
    model = whole.get("model")
    model = dict(model) if model and isinstance(model, Mapping) else {"preset": DEFAULT_PRESET}
    whole["model"] = {**expand_preset({"preset": DEFAULT_PRESET}), "preset": None, **expand_preset(model)}
    layout = whole.get("layout")
    is_auto = layout == "auto" or (isinstance(layout, Mapping) and "auto" in layout)
    return {**derived.values_of(FIELDS | PARTS | _DRY | _AUTO, whole), "auto": "true" if is_auto else "false"}


def constraints(values: Mapping[str, str]) -> dict[str, str]:
    """What else is asked of a layout that is chosen, by fields that the form does not show."""
    kept = (name for name in _AUTO if name not in _RANKS)
    return {name.removeprefix("layout.auto."): values[name] for name in kept if values[name]}


def options_for(values: Mapping[str, str]) -> derived.Options:
    """The choices of each segmented field."""
    return derived.options_of(FIELDS, _WORDS, values)


def limits() -> dict[str, str]:
    """What each number must lie between."""
    return derived.limits_of(FIELDS | _DRY | _RANKS)


def folds(values: Mapping[str, str], errors: Mapping[str, str], starter: Mapping[str, Any]) -> Folds:
    """How the folded parts stand for these values; one with an error is open. What a fresh form is filled in with, the
    `starter`, nobody changed."""
    usual, fresh = values_from_spec(None), values_from_spec(starter)
    differs = {name for name in usual if values.get(name) not in (usual[name], fresh[name])}
    changed = [fold for fold, names in _FOLDS.items() if differs.intersection(names)]
    wrong = [fold for fold, names in _FOLDS.items() if any(errors.get(name) for name in names)]
    return Folds(changed, [fold for fold in _FOLDS if fold in wrong or (fold in _STARTS_OPEN and fold in changed)])


def errors_by_field(problems: list[Problem]) -> tuple[dict[str, str], list[str]]:
    """Messages for the fields the form has, and lines for the rest."""
    return derived.errors_beside(problems, [*FIELDS, *_DRY, *_RANKS, "model", "layout", "layout.auto"], {})


def preset_cards() -> dict[str, dict[str, Any]]:
    """What the page tells about each preset."""
    return {
        name: {
            "description": preset.description,
            "parameters": parameter_count(preset.model),
            "sizes": {**preset.model.model_dump(include=_SIZES), **_parts(preset.model)},
        }
        for name, preset in PRESETS.items()
    }


def _parts(model: ModelSpec) -> dict[str, str]:
    texts = derived.values_of(PARTS, {"model": model.model_dump()})
    return {name.removeprefix("model."): text for name, text in texts.items()}
