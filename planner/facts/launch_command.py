"""Check the command line of a script job, which starts all ranks by its own launcher."""

from __future__ import annotations

import re
import shlex
from pathlib import PurePosixPath

from planner.facts.spec import JobSpec
from planner.facts.validation import Problem

# They start processes on other machines, in containers, or as another user, where Meshboard cannot end them.
UNSUPPORTED_PROGRAMS = frozenset(
    (
        *("srun", "sbatch", "salloc", "mpirun", "mpiexec", "ssh", "pdsh", "ray", "kubectl"),
        *("docker", "podman", "singularity", "apptainer", "sudo", "su"),
    )
)
BUILTINS = frozenset(("cd", "source", ".", "export", "exec", "set", "if", "for", "while"))
OPERATORS = frozenset(("&&", "||", "|", ";", "&", ">", ">>", "<", "2>", "2>&1"))
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
RANKS_OPTION = re.compile(r"--?(nproc[-_]per[-_]node|num[-_]processes|num[-_]gpus)(?:=(\d+))?")
NODES_OPTION = re.compile(r"--?(nnodes|num[-_]machines|num[-_]nodes)(?:=(\d+))?")


def find_command_problems(command: str, spec: JobSpec) -> list[Problem]:
    """Return the problems of `script.command`, and of the fields that it excludes."""
    assert spec.script is not None, "the command belongs to a script"
    found = []
    if spec.script.args:
        found.append(
            Problem(
                "script.args", "`script.args` is set, but `script.command` contains the arguments. Omit one of them."
            )
        )
    if (spec.resources.max_hosts or 1) > 1:
        text = f"`resources.max_hosts` is {spec.resources.max_hosts}, but a command runs on one host. Use 1."
        found.append(Problem("resources.max_hosts", text))
    if (slurm := spec.resources.slurm) is not None and slurm.nodes > 1:
        text = f"`resources.slurm.nodes` is {slurm.nodes}, but a command runs on one node. Use 1."
        found.append(Problem("resources.slurm.nodes", text))
    try:
        words = shlex.split(command)
    except ValueError as error:
        return [*found, _report(f"is not a valid command line ({str(error).lower()}). Close the quotation mark.")]
    if text := _explain_invalid_words(words):
        return [*found, _report(text)]
    return [*found, *_find_size_problems(words, spec.layout.dp)]


def _report(text: str) -> Problem:
    return Problem("script.command", f"`script.command` {text}")


def _explain_invalid_words(words: list[str]) -> str:
    """Return why a command cannot start, or an empty text."""
    if not words or not words[0]:
        return "is empty. Enter a command such as `torchrun train.py`."
    first = words[0][:100]
    if ASSIGNMENT.fullmatch(first):
        return f"starts with {first!r}. Put `env` before the variable."
    if first in BUILTINS:
        return f"starts with {first!r}, which only a shell can run. Use `bash -c '...'`."
    if operator := next((word for word in words if word in OPERATORS or word.endswith(";")), None):
        return f"contains {operator[:100]!r}, which only a shell can read. Use `bash -c '...'`."
    if PurePosixPath(first).name in UNSUPPORTED_PROGRAMS:
        return (
            f"starts with {first!r}, whose processes can be outside of the job. "
            "Use torchrun, accelerate, deepspeed, python, or bash."
        )
    return ""


def _find_size_problems(words: list[str], ranks: int) -> list[Problem]:
    """Return the problems of options with the number of ranks or nodes."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        for option, expected, unit in ((RANKS_OPTION, ranks, "ranks"), (NODES_OPTION, 1, "nodes")):
            match = option.fullmatch(word)
            value = "" if match is None else match[2] or after
            if not value.isdecimal() or int(value) == expected:
                continue
            shown = f"starts {value[:20]} {unit} (`{word[:100]}`)"
            if unit == "nodes":
                return [_report(f"{shown}, but a command runs on one host. Use 1.")]
            return [Problem("layout.dp", f"`layout.dp` is {ranks}, but `script.command` {shown}. Use equal numbers.")]
    return []
