"""torch.compile of each block's computation, and what is kept out of it."""

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


_kept_out: list[list[Callable[..., Any]]] = []


def not_compiled(function: F) -> F:
    """Keep a function that sends out of compiled code: Inductor would send by itself, past the meter.

    From the first time that anything is compiled: to import the compiler takes most of a second of each rank's start.
    """
    held: list[Callable[..., Any]] = [function]
    _kept_out.append(held)

    @functools.wraps(function)
    def called(*args: Any, **named: Any) -> Any:
        return held[0](*args, **named)

    return cast(F, called)


def compiled(function: F) -> F:
    """The function as kernels of its own.

    Raises:
        UserError: where this host cannot build them.
    """
    while _kept_out:
        held = _kept_out.pop()
        held[0] = torch.compiler.disable(held[0])
    wanted = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    if not any(map(shutil.which, wanted)):
        raise UserError(f"`train.compile` needs a C++ compiler, but this host has no {' or '.join(wanted)}.")
    return cast(F, torch.compile(function))
