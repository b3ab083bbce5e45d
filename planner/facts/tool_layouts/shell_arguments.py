"""Read command-line arguments from a shell script, with the variables that the script sets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

# An argument of Megatron-LM in a command, and not as a key of YAML.
_ARGUMENT = re.compile(
    r"--(?:num-layers|hidden-size|micro-batch-size|global-batch-size|(?:tensor-|pipeline-)?model-parallel-size"
    r"|seq-length|context-parallel-size|use-distributed-optimizer)(?=[\s=\"')]|\Z)"
)
_ASSIGNMENT = re.compile(r"\s*(?:export\s+|local\s+|declare\s+)?([A-Za-z_]\w*)=([^(].*)?\Z")
_VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]([^{}]*))?\}|\$([A-Za-z_]\w*)")
_ARITHMETIC = re.compile(r"\$\(\(([\w\s$*/+-]{1,200})\)\)")
_BARE_NAME = re.compile(r"(?<![$\w])([A-Za-z_]\w*)")
_PRODUCT = re.compile(r"\s*\d{1,9}\s*(?:[*/]\s*\d{1,9}\s*){0,8}\Z")
_MAX_VALUE_CHARACTERS = 2_000
_MAX_PASSES = 8  # of variables in values of variables


CONDITION = "if"  # key of a script that has branches


def has_arguments(text: str) -> bool:
    """Return whether a text has arguments of Megatron-LM."""
    return _ARGUMENT.search(text) is not None


def parse_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a script by their names with `--`. A flag without value is True.

    An argument with several different values in the script has the list of them.
    """
    variables: dict[str, str] = {}
    found: dict[str, list[Any]] = {}
    for line in _join_lines(text):
        words = _split(line)
        prefixed = line.lstrip().startswith(("export ", "local ", "declare "))
        if (match := _ASSIGNMENT.match(line)) and len(words) <= 1 + prefixed:
            value = (_split(match[2] or "") or [""])[0]
            variables[match[1]] = _expand(value, variables)
            words = [variables[match[1]]] if "--" in value else []
        if words[:1] == [CONDITION]:
            found[CONDITION] = [True]
        _collect([word for one in words for word in _split_inner(_expand(one, variables))], found)
    values = {name: list(dict.fromkeys(map(str, some))) for name, some in found.items()}
    return {name: some[0] if len(values[name]) == 1 else values[name] for name, some in found.items()}


def _join_lines(text: str) -> Iterator[str]:
    """Yield the lines of a script, with continued lines as one."""
    joined = ""
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            continue
        if line.rstrip().endswith("\\"):
            joined += line.rstrip()[:-1] + " "
            continue
        yield joined + line
        joined = ""
    yield joined


def _split(text: str) -> list[str]:
    lexer = shlex.shlex(text.strip(), posix=True)
    lexer.whitespace_split, lexer.commenters = True, "#"
    try:
        return list(lexer)
    except ValueError:  # an open quote, for example of text over several lines
        return text.split()


def _split_inner(word: str) -> list[str]:
    """Split a quoted word such as "--fp8-format hybrid", and drop the brackets of an array."""
    if "--" in word:
        word = re.sub(r"^\w+\+?=\(", "", word)
    if "(" not in word:
        word = word.rstrip(")")
    return _split(word) if "--" in word and " " in word else [word]


def _expand(text: str, variables: dict[str, str]) -> str:
    """Replace variables that the script sets, and products of them. Other variables stay as they are."""

    def replace(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        if name in variables:
            return variables[name]
        return match[0] if match[2] is None else match[2].strip("\"'")

    for _ in range(_MAX_PASSES):
        new = _ARITHMETIC.sub(_compute, _VARIABLE.sub(replace, _ARITHMETIC.sub(_add_dollars, text)))
        new = new[:_MAX_VALUE_CHARACTERS]
        if new == text:
            break
        text = new
    return text


def _add_dollars(match: re.Match[str]) -> str:
    """Return a product whose variables all start with a dollar sign."""
    return "$((" + _BARE_NAME.sub(r"$\1", match[1]) + "))"


def _compute(match: re.Match[str]) -> str:
    """Return the product of numbers, or the unchanged text."""
    if not _PRODUCT.match(match[1]):
        return match[0]
    result, *rest = re.split(r"\s*([*/])\s*", match[1].strip())
    number = int(result)
    for operator, factor in zip(rest[::2], rest[1::2], strict=True):
        if operator == "/" and int(factor) == 0:
            return match[0]
        number = number * int(factor) if operator == "*" else number // int(factor)
    return str(number)


def _collect(words: list[str], found: dict[str, list[Any]]) -> None:
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            found.setdefault(name, []).append(value if equals else True)
            name = "" if equals else name
        elif name and found[name][-1] is True and word and not word.startswith(("-", "$(", "|", "&", ">", ";")):
            found[name][-1] = word
