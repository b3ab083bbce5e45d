"""Read the spec file of a job or a dry run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from planner.facts.parse_spec import parse_spec
from planner.facts.spec import JobSpec
from planner.facts.spec_rules import find_unsupported_fields
from planner.facts.validation import SpecError
from workers.trainer.errors import UserError


def load_spec(path: Path, world: int) -> JobSpec:
    """Read the spec of a job for a world of `world` ranks. Raises UserError, SpecError."""
    spec = parse_spec(read_spec_file(path))
    if refused := find_unsupported_fields(spec):
        raise SpecError(refused)
    if spec.layout.world_size != world:
        raise UserError(f"`layout` needs {spec.layout.world_size} ranks, but torchrun started {world}.")
    return spec


def read_spec_file(path: Path) -> Any:
    """Return the JSON of a spec file. Raises UserError."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"`--spec` is {str(path)!r}, which cannot be read: {error.strerror or error}.") from None
    except ValueError as error:
        raise UserError(f"`--spec` is {str(path)!r}, which is not JSON: {error}.") from None
