"""Compile blocks with torch.compile, and exclude functions from compilation."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from workers.trainer.errors import UserError

F = TypeVar("F", bound=Callable[..., Any])
COMPILERS = ("g++", "clang++", "c++")


_excluded: list[list[Callable[..., Any]]] = []


def exclude_from_compile(function: F) -> F:
    """Exclude a function that communicates from compiled code. Inductor would bypass the meter.

    The exclusion takes effect at the first `compile_function`, because importing the compiler takes almost a second.
    """
    cell: list[Callable[..., Any]] = [function]
    _excluded.append(cell)

    @functools.wraps(function)
    def called(*args: Any, **named: Any) -> Any:
        return cell[0](*args, **named)

    return cast(F, called)


def compile_function(function: F) -> F:
    """Return the compiled function. Raises UserError."""
    while _excluded:
        cell = _excluded.pop()
        cell[0] = torch.compiler.disable(cell[0])
    wanted = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    if not any(map(shutil.which, wanted)):
        raise UserError(f"`train.compile` needs a C++ compiler, but this host has no {' or '.join(wanted)}.")
    return cast(F, torch.compile(function))
