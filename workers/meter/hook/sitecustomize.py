"""Meter the ranks of any launcher: Python imports this module at its start, from the first folder of PYTHONPATH.

This module imports neither Meshboard nor torch. A process becomes a rank when it calls `init_process_group`, or when an
optimizer exists and a backward pass begins. Only a rank loads the meter. `meshboard.step()` also loads it.

The module runs in the Python of the user, which may be older than Meshboard's.
"""

from __future__ import annotations

import os
import sys
from _frozen_importlib_external import PathFinder  # `importlib.machinery` would load more modules

TYPE_CHECKING = False  # importing `typing` would double the time of this module
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any
else:
    ModuleType = type(sys)

NAME = "meshboard_hook"
FOLDER = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(FOLDER)))
OWN_PACKAGES = ("contracts", "planner", "workers")
TELEMETRY_VARIABLE = "MESHBOARD_TELEMETRY"
PACKAGES_VARIABLE = "MESHBOARD_METER_PACKAGES"  # folder of the packages that the user's Python may not have


class Hook:
    """State of the hook in this process, and a finder that calls a function after the import of a module."""

    def __init__(self) -> None:
        self.is_enabled = True
        self._activation: Any = None
        self._followers = {
            "torch.distributed.distributed_c10d": self._watch_groups,
            "torch.optim.optimizer": self._watch_optimizers,
        }

    def disable(self) -> None:
        """Leave this process to `python -m workers.meter`."""
        self.is_enabled = False
        sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a watched module, and None for all others."""
        follow = self._followers.get(name)
        if follow is None:
            return None
        del self._followers[name]
        spec: Any = next(filter(None, (f.find_spec(name, path, target) for f in sys.meta_path if f is not self)), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                follow(module)

            spec.loader.exec_module = exec_module
        return spec

    def load(self) -> Any:
        """Import the module that starts the meter, or return None after printing the reason."""
        if not self.is_enabled or self._activation is not None:
            return self._activation
        try:
            self._activation = _import_activation()
        except Exception as error:
            self.is_enabled = False
            text = " ".join(str(error).split())[:300]
            sys.stderr.write(f"meshboard: this process is not metered: {type(error).__name__}: {text}\n")
        return self._activation

    def _watch_groups(self, module: Any) -> None:
        original = module.init_process_group

        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            activation = self.load()
            if activation is not None:
                activation.meter_group_member(args, kwargs)
            return original(*args, **kwargs)

        for name in ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__"):
            setattr(init_process_group, name, getattr(original, name, None))
        init_process_group.__wrapped__ = original  # type: ignore[attr-defined]
        module.init_process_group = init_process_group

    def _watch_optimizers(self, module: Any) -> None:
        original = module.Optimizer.__init__

        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            module.Optimizer.__init__ = original
            activation = self.load()
            if activation is not None:
                activation.watch_first_backward()
            original(optimizer, *args, **kwargs)

        init.__wrapped__ = original  # type: ignore[attr-defined]
        module.Optimizer.__init__ = init


class MarkModule(ModuleType):
    """The modules `meshboard` and `meshboard_meter`. The first call of a function starts the meter."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._call(name, args, kwargs)

    def _call(self, name: str, args: Any, kwargs: Any) -> Any:
        activation = HOOK.load()
        marks = None if activation is None else activation.meter_single_process()
        if marks is not None:
            self.__dict__.update((name, value) for name, value in vars(marks).items() if not name.startswith("__"))
            return getattr(marks, name)(*args, **kwargs)
        import contextlib

        return contextlib.nullcontext()


class MarkFinder:
    """Find `meshboard` on a host without the client. It is the last finder."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name != "meshboard":
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, MarkFinder())  # type: ignore[arg-type]  # it has all methods of a loader

    @staticmethod
    def create_module(spec: Any) -> ModuleType:
        return sys.modules["meshboard_meter"]

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Keep the module as it is."""


def _import_activation() -> Any:
    """Import the meter without a lasting change of the user's modules and path."""
    path, before, users = list(sys.path), set(sys.modules), _take_modules()
    packages = os.environ.get(PACKAGES_VARIABLE)
    sys.path[:] = [ROOT, *path, *filter(None, [packages])]
    try:
        import workers.meter.activation as activation
    finally:
        sys.path[:] = path
        if packages and packages not in path:
            _forget_modules(packages + os.sep, before)
        own = _take_modules()
        sys.modules.update(users)
        for name, module in own.items():
            package = name.partition(".")[0]
            found = PathFinder.find_spec(package)
            if package not in users and (found is None or found.origin == own[package].__file__):
                sys.modules[name] = module
    return activation


def _take_modules() -> dict[str, ModuleType]:
    """Remove the modules of packages with the names of Meshboard's packages, and return them."""
    names = [name for name in sys.modules if name.partition(".")[0] in OWN_PACKAGES]
    return {name: sys.modules.pop(name) for name in names}


def _forget_modules(folder: str, before: set[str]) -> None:
    """Let the user's code import only its own packages. The meter keeps the modules that it has imported."""
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
            del sys.modules[name]


def _import_next() -> None:
    """Import the module `sitecustomize` of the user or the system, which this one covers."""
    folders = [folder for folder in sys.path if os.path.abspath(folder) != FOLDER]
    spec = PathFinder.find_spec("sitecustomize", folders)
    if spec is None or spec.loader is None:
        return
    module = ModuleType("sitecustomize")
    module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


HOOK = Hook()
if os.environ.get(TELEMETRY_VARIABLE):
    sys.modules[NAME] = sys.modules[__name__]  # `_import_next` replaces its first name
    sys.modules["meshboard_meter"] = MarkModule("meshboard_meter")
    sys.meta_path.insert(0, HOOK)
    sys.meta_path.append(MarkFinder)
_import_next()
