"""torch.compile of each block's computation, and what is kept out of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from workers.trainer.errors import UserError

F = TypeVar("F", bound=Callable[..., Any])
COMPILERS = ("g++", "clang++", "c++")


def not_compiled(function: F) -> F:
    """Keep a function that sends out of compiled code: Inductor would send by itself, past the meter."""
    return cast(F, torch.compiler.disable(function))


def compiled(function: F) -> F:
    """The function as kernels of its own.

    Raises:
        UserError: where this host cannot build them.
    """
    wanted = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    if not any(map(shutil.which, wanted)):
        raise UserError(f"train.compile: torch.compile needs a C++ compiler; this host has no {', '.join(wanted)}")
    return cast(F, torch.compile(function))
