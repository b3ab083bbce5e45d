"""Format the results of the verification as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from contracts.telemetry.results import Mismatch, ReferenceProof, ReplicaProof, RouterChoices

MAX_MISMATCHES_IN_TEXT = 3
ROUNDING_KINDS = ("gradient", "gradient norm", "update")
ROUNDING = 1e-5  # of fp32; larger differences are reported as within limits


def get_severity(apart: Mismatch) -> float:
    """Return the difference relative to its limit. NaN and infinite values come first."""
    if apart["apart"] is None:
        return math.inf
    return apart["apart"] / apart["limit"] if apart["limit"] else math.inf


def format_difference(apart: Mismatch) -> str:
    """Format a mismatch: 'gradient of head.weight differs from the reference by 6.1e-01 on rank 1 (limit 1e-04)'."""
    if apart["what"] == "share":
        return apart["name"]
    by = "with NaN or infinite values" if apart["apart"] is None else f"by {apart['apart']:.1e}"
    if apart["what"] == "rows":
        rows = f"rows of {apart['name']} on rank {apart['ranks'][0]}"
        return f"{apart['apart']:.0%} of the {rows} differ from the data on rank 0"
    subject = f"{apart['what']} of {apart['name']}"
    if len(apart["ranks"]) == 2:
        rank, other = apart["ranks"]
        where = f"on rank {rank} differs from rank {other} (over {apart['axis']}) {by}"
    elif apart["what"] in ("loss", "gradient norm", "choice"):
        where = f"differs from the reference {by}"
    else:
        where = f"differs from the reference {by} on rank {apart['ranks'][0]}"
    return f"{subject} {where} (limit {apart['limit']:.0e})"


def format_failure(wrong: Sequence[Mismatch]) -> str:
    """Format the worst mismatches, and count the rest."""
    worst = sorted(wrong, key=get_severity, reverse=True)
    text = "; ".join(format_difference(apart) for apart in worst[:MAX_MISMATCHES_IN_TEXT])
    rest = len(wrong) - MAX_MISMATCHES_IN_TEXT
    return f"verification failed: {text}" + (f"; and {rest} more" if rest > 0 else "")


def can_be_rounding(wrong: Sequence[Mismatch]) -> bool:
    """Return whether all mismatches can be rounding that one batch amplifies."""
    return bool(wrong) and all(apart["what"] in ROUNDING_KINDS for apart in wrong)


def format_retried_step(step: int, wrong: Sequence[Mismatch]) -> str:
    """Format the reason for another extra step."""
    return f"a later step was compared, because in step {step} {format_difference(max(wrong, key=get_severity))}"


def format_replicas(replicas: ReplicaProof, wrong: Sequence[Mismatch]) -> str:
    """Format the comparison of replicas: 'replicas match (34 of 60 shards have replicas, after steps 1, 50)'."""
    if not replicas["steps"]:
        return "replicas not compared: no steps left to train"
    mismatches = [apart for apart in wrong if len(apart["ranks"]) == 2 or apart["what"] in ("share", "rows")]
    steps = ", ".join(map(str, replicas["steps"]))
    about = f"{replicas['copied']} of {replicas['parts']} shards have replicas, after steps {steps}"
    if mismatches:
        return f"replicas differ: {format_difference(max(mismatches, key=get_severity))} ({about})"
    if not replicas["copied"]:
        return f"no replicas to compare ({about})"
    near = f" to {replicas['apart']:.0e}" if replicas["apart"] else ""
    return f"replicas match{near} ({about})"


def format_reference(one: ReferenceProof) -> str:
    """Format the comparison with the reference: 'gradients match the single-process reference to 3e-07 (...)'."""
    if one["state"] == "due":
        return f"single-process reference due after step {one['steps']}"
    if one["state"] == "not checked":
        return f"not compared with the single-process reference: {one['why']}"
    figures = _format_differences(one)
    if one["state"] == "apart":
        return f"differs from the single-process reference ({figures})"
    if one["gradient"] <= ROUNDING:
        return f"gradients match the single-process reference to {one['gradient']:.0e} ({figures})"
    return f"gradients match the single-process reference within limits, difference {one['gradient']:.2g} ({figures})"


def format_end_step(end: ReferenceProof) -> str:
    """Format the extra final step: 'extra final step matches the reference to 3e-07 (...)'."""
    if end["state"] == "not checked":
        return f"extra final step not compared: {end['why']}"
    if end["state"] == "apart":
        return f"extra final step differs from the reference ({_format_differences(end)})"
    return f"extra final step matches the reference to {end['gradient']:.0e} ({_format_differences(end)})"


def _format_differences(one: ReferenceProof) -> str:
    return (
        f"largest differences: gradients of {one['tensors']} tensors {one['gradient']:.0e}, updates "
        f"{one['update']:.0e}, norms {one['norm']:.0e}, losses of {_format_steps(one['steps'])} {one['loss']:.0e}; "
        f"computed in {one['seconds']:.1f} s; "
        f"{_format_choices(one['choices']) if 'choices' in one else ''}{one['why']}"
    )


def _format_choices(choices: RouterChoices) -> str:
    """Format the expert choices: 'the reference used the expert choices of the run for 768 tokens, ...'."""
    text = f"the reference used the expert choices of the run for {choices['tokens']} tokens of all layers"
    if not choices["turned"]:
        return f"{text}, which equal its own choices; "
    return f"{text}, {choices['turned']} of which differ from its own choices by at most {choices['gap']:.0e}; "


def _format_steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"
