"""Page of the job spec, from the models that read it."""

from __future__ import annotations

from typing import Any

from manual.reference.markdown import describe_type, escape_markdown, format_fields
from planner.facts.presets import PRESETS
from planner.facts.spec import JobSpec, Layout
from planner.search.auto_layout import AutoSpec

HEAD = """# Job spec

A spec describes a job, in JSON or YAML. The form, the REST interface, the command, and the trainer all use it.
Meshboard refuses unknown fields.

A job needs `model` (all sizes, or a `preset` and the sizes that differ) unless it is a script or a lab. `layout` may be
`"auto"`, or `{"auto": {..}}` with constraints ([AutoSpec](#autospec)).
"""


def build_page() -> str:
    """Return the Markdown of the page."""
    schema = JobSpec.model_json_schema()
    auto = AutoSpec.model_json_schema()
    for name in AutoSpec.model_fields.keys() & Layout.model_fields.keys():  # an option has the meaning of the field
        auto["properties"][name].setdefault("description", Layout.model_fields[name].description)
    models: dict[str, Any] = {**schema.pop("$defs"), **auto.pop("$defs", {}), "AutoSpec": auto}
    parts = [HEAD, "## JobSpec\n", escape_markdown(schema.get("description", "")) + "\n", format_fields(schema)]
    for name in sorted(models, key=lambda name: name == "AutoSpec"):
        model = models[name]
        body = format_fields(model) if "properties" in model else describe_type(model) + "\n"
        parts += [f"## {name}\n", escape_markdown(model.get("description", "")) + "\n", body]
    parts += ["## Presets\n", ", ".join(f"`{name}`" for name in PRESETS) + "\n"]
    return "\n".join(parts)
