"""What was found, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from contracts.telemetry.proof import Choices, Mismatch, ProcessProof, ReplicaProof

MOST_TOLD = 3
OF_A_BATCH = ("gradient", "gradient norm", "update")
ROUNDING = 1e-5  # of fp32: gradients beyond it are not called equal, only within their limit


def gravity(apart: Mismatch) -> float:
    """How far beyond its limit: what is no number first."""
    if apart["apart"] is None:
        return math.inf
    return apart["apart"] / apart["limit"] if apart["limit"] else math.inf


def apart_words(apart: Mismatch) -> str:
    """'gradient of head.weight differs from one process by 6.1e-01 on rank 1 (limit 1e-04)'"""
    if apart["what"] == "share":
        return apart["name"]
    by = "by what is no number" if apart["apart"] is None else f"by {apart['apart']:.1e}"
    if apart["what"] == "rows":
        whose = f"rank {apart['ranks'][0]}'s rows of {apart['name']}"
        return f"{apart['apart']:.0%} of {whose} are not those of rank 0's data"
    subject = f"{apart['what']} of {apart['name']}"
    if len(apart["ranks"]) == 2:
        rank, other = apart["ranks"]
        where = f"on rank {rank} differs from rank {other} (over {apart['axis']}) {by}"
    elif apart["what"] in ("loss", "gradient norm", "choice"):
        where = f"differs from one process {by}"
    else:
        where = f"differs from one process {by} on rank {apart['ranks'][0]}"
    return f"{subject} {where} (limit {apart['limit']:.0e})"


def wrong_words(wrong: Sequence[Mismatch]) -> str:
    """One sentence: the worst, and how many more."""
    worst = sorted(wrong, key=gravity, reverse=True)
    told = "; ".join(apart_words(apart) for apart in worst[:MOST_TOLD])
    rest = len(wrong) - MOST_TOLD
    return f"proof failed: {told}" + (f"; and {rest} more" if rest > 0 else "")


def may_be_its_batch(wrong: Sequence[Mismatch]) -> bool:
    """Whether something is beyond its limit, and all that is may be rounding that one batch makes much of."""
    return bool(wrong) and all(apart["what"] in OF_A_BATCH for apart in wrong)


def batch_words(step: int, wrong: Sequence[Mismatch]) -> str:
    """Of a step (from 1) that was beyond its limits, and was followed by another."""
    return f"of step {step} {apart_words(max(wrong, key=gravity))}, which may be its batch: this is the next"


def replica_words(replicas: ReplicaProof, wrong: Sequence[Mismatch]) -> str:
    """'replicas agree (34 of 60 parts have copies, after steps 1, 50)'"""
    if not replicas["steps"]:
        return "replicas not compared: no step was left to train"
    found = [apart for apart in wrong if len(apart["ranks"]) == 2 or apart["what"] in ("share", "rows")]
    steps = ", ".join(map(str, replicas["steps"]))
    about = f"{replicas['copied']} of {replicas['parts']} parts have copies, after steps {steps}"
    if found:
        return f"replicas differ: {apart_words(max(found, key=gravity))} ({about})"
    if not replicas["copied"]:
        return f"no rank holds what another does ({about})"
    near = f" to {replicas['apart']:.0e}" if replicas["apart"] else ""
    return f"replicas agree{near} ({about})"


def one_process_words(one: ProcessProof) -> str:
    """'gradients equal to one process to 3e-07 (of 60 tensors; updates 2e-04, ...)'"""
    if one["state"] == "due":
        return f"not yet compared with one process: that comes after step {one['steps']}"
    if one["state"] == "not checked":
        return f"not checked against one process: {one['why']}"
    figures = _figures(one)
    if one["state"] == "apart":
        return f"NOT equal to one process ({figures})"
    if one["gradient"] <= ROUNDING:
        return f"gradients equal to one process to {one['gradient']:.0e} ({figures})"
    return f"gradients within their limits of one process, {one['gradient']:.2g} apart ({figures})"


def end_words(end: ProcessProof) -> str:
    """'one step more equal to one process to 3e-07 (gradients of 60 tensors 3e-07, ...)'"""
    if end["state"] == "not checked":
        return f"one step more not checked: {end['why']}"
    if end["state"] == "apart":
        return f"one step more NOT equal to one process ({_figures(end)})"
    return f"one step more equal to one process to {end['gradient']:.0e} ({_figures(end)})"


def _figures(one: ProcessProof) -> str:
    return (
        f"gradients of {one['tensors']} tensors {one['gradient']:.0e}, their updates {one['update']:.0e}, "
        f"norms {one['norm']:.0e}, losses {one['loss']:.0e} of {_steps(one['steps'])}, in {one['seconds']:.1f} s; "
        f"{_choice_words(one['choices']) if 'choices' in one else ''}{one['why']}"
    )


def _choice_words(choices: Choices) -> str:
    """'it took the experts that routers chose for 768 tokens, 5 of them not its own, by 4e-03; '"""
    told = f"it took the experts that routers chose for {choices['tokens']} tokens of all layers"
    if not choices["turned"]:
        return f"{told}, all as its own; "
    return f"{told}, {choices['turned']} of them not its own, by {choices['gap']:.0e} at most; "


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"
