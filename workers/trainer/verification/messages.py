"""What was found, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from contracts.telemetry.results import Mismatch, ReferenceProof, ReplicaProof, RouterChoices

MOST_TOLD = 3
OF_A_BATCH = ("gradient", "gradient norm", "update")
ROUNDING = 1e-5  # of fp32: gradients beyond it are not called equal, only within their limit


def gravity(apart: Mismatch) -> float:
    """How far beyond its limit: what is no number first."""
    if apart["apart"] is None:
        return math.inf
    return apart["apart"] / apart["limit"] if apart["limit"] else math.inf


def apart_words(apart: Mismatch) -> str:
    """'gradient of head.weight differs from the reference by 6.1e-01 on rank 1 (limit 1e-04)'"""
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


def wrong_words(wrong: Sequence[Mismatch]) -> str:
    """One sentence: the worst, and how many more."""
    worst = sorted(wrong, key=gravity, reverse=True)
    told = "; ".join(apart_words(apart) for apart in worst[:MOST_TOLD])
    rest = len(wrong) - MOST_TOLD
    return f"verification failed: {told}" + (f"; and {rest} more" if rest > 0 else "")


def may_be_its_batch(wrong: Sequence[Mismatch]) -> bool:
    """Whether something is beyond its limit, and all that is may be rounding that one batch makes much of."""
    return bool(wrong) and all(apart["what"] in OF_A_BATCH for apart in wrong)


def batch_words(step: int, wrong: Sequence[Mismatch]) -> str:
    """Of a step (from 1) that was beyond its limits, and was followed by another."""
    return f"a later step was compared, because in step {step} {apart_words(max(wrong, key=gravity))}"


def replica_words(replicas: ReplicaProof, wrong: Sequence[Mismatch]) -> str:
    """'replicas match (34 of 60 shards have replicas, after steps 1, 50)'"""
    if not replicas["steps"]:
        return "replicas not compared: no steps left to train"
    found = [apart for apart in wrong if len(apart["ranks"]) == 2 or apart["what"] in ("share", "rows")]
    steps = ", ".join(map(str, replicas["steps"]))
    about = f"{replicas['copied']} of {replicas['parts']} shards have replicas, after steps {steps}"
    if found:
        return f"replicas differ: {apart_words(max(found, key=gravity))} ({about})"
    if not replicas["copied"]:
        return f"no replicas to compare ({about})"
    near = f" to {replicas['apart']:.0e}" if replicas["apart"] else ""
    return f"replicas match{near} ({about})"


def one_process_words(one: ReferenceProof) -> str:
    """'gradients match the reference to 3e-07 (largest differences: gradients of 60 tensors 3e-07, ...)'"""
    if one["state"] == "due":
        return f"single-process reference due after step {one['steps']}"
    if one["state"] == "not checked":
        return f"not compared with the single-process reference: {one['why']}"
    figures = _figures(one)
    if one["state"] == "apart":
        return f"differs from the single-process reference ({figures})"
    if one["gradient"] <= ROUNDING:
        return f"gradients match the single-process reference to {one['gradient']:.0e} ({figures})"
    return f"gradients match the single-process reference within limits, difference {one['gradient']:.2g} ({figures})"


def end_words(end: ReferenceProof) -> str:
    """'extra final step matches the reference to 3e-07 (largest differences: gradients of 60 tensors 3e-07, ...)'"""
    if end["state"] == "not checked":
        return f"extra final step not compared: {end['why']}"
    if end["state"] == "apart":
        return f"extra final step differs from the reference ({_figures(end)})"
    return f"extra final step matches the reference to {end['gradient']:.0e} ({_figures(end)})"


def _figures(one: ReferenceProof) -> str:
    return (
        f"largest differences: gradients of {one['tensors']} tensors {one['gradient']:.0e}, updates "
        f"{one['update']:.0e}, norms {one['norm']:.0e}, losses of {_steps(one['steps'])} {one['loss']:.0e}; "
        f"computed in {one['seconds']:.1f} s; "
        f"{_choice_words(one['choices']) if 'choices' in one else ''}{one['why']}"
    )


def _choice_words(choices: RouterChoices) -> str:
    """'the reference used the expert choices of the run for 768 tokens, 5 of them ...; '"""
    told = f"the reference used the expert choices of the run for {choices['tokens']} tokens of all layers"
    if not choices["turned"]:
        return f"{told}, which equal its own choices; "
    return f"{told}, {choices['turned']} of which differ from its own choices by at most {choices['gap']:.0e}; "


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"
