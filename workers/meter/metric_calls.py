"""Read the metrics that a script logs through other libraries, without importing these libraries.

A hook is installed when the script imports a library. The hook calls the original function first, so an error of the
library stays the same, and reads only numbers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

from contracts.telemetry.metrics import MetricSource
from workers.metric_values import MetricCollector

STEP_METRICS = ("train/global_step", "trainer/global_step")  # of transformers and Lightning
Arguments = dict[str, Any]  # of a call, by name
# Read the step and the values of a call. Without a step, the number of completed steps counts.
ReadCall = Callable[[Any, Arguments], tuple[Any, Mapping[str, Any]]]


def _read_scalar(_writer: Any, call: Arguments) -> tuple[Any, Mapping[str, Any]]:
    return call.get("global_step"), {str(call.get("tag", "")): call.get("scalar_value")}


def _read_scalars(_writer: Any, call: Arguments) -> tuple[Any, Mapping[str, Any]]:
    values, tag = call.get("tag_scalar_dict") or {}, call.get("main_tag", "")
    return call.get("global_step"), {f"{tag}/{name}": value for name, value in values.items()}


def _read_run(_run: Any, call: Arguments) -> tuple[Any, Mapping[str, Any]]:
    """Read a call of wandb or trackio. Trainers without an explicit step log it as a metric."""
    values = call.get("data") or call.get("metrics") or {}
    steps = (call.get("step"), *(values.get(name) for name in STEP_METRICS), call["_run_step"])
    return next((step for step in steps if isinstance(step, int)), None), values


def _read_mlflow_metric(_module: Any, call: Arguments) -> tuple[Any, Mapping[str, Any]]:
    return call.get("step"), {str(call.get("key", "")): call.get("value")}


def _read_mlflow_metrics(_module: Any, call: Arguments) -> tuple[Any, Mapping[str, Any]]:
    return call.get("step"), call.get("metrics") or {}


def _read_trainer(trainer: Any, call: Arguments) -> tuple[Any, Mapping[str, Any]]:
    return trainer.state.global_step, call.get("logs") or {}


class Hook(NamedTuple):
    """A function of a library that logs metrics."""

    source: MetricSource
    owner: str  # class of the function, or "" for a function of the module
    name: str
    parameters: Sequence[str]  # names of positional parameters
    read: ReadCall
    next_step: Sequence[str] = ()  # attributes of the owner with the step of a call without a step, by version


_WRITER_HOOKS = (
    Hook("SummaryWriter", "SummaryWriter", "add_scalar", ("tag", "scalar_value", "global_step"), _read_scalar),
    Hook(
        "SummaryWriter", "SummaryWriter", "add_scalars", ("main_tag", "tag_scalar_dict", "global_step"), _read_scalars
    ),
)
HOOKS: dict[str, tuple[Hook, ...]] = {
    "torch.utils.tensorboard.writer": _WRITER_HOOKS,
    "tensorboardX.writer": _WRITER_HOOKS,
    "wandb.sdk.wandb_run": (Hook("wandb", "Run", "log", ("data", "step"), _read_run, ("_local_step", "_step")),),
    "trackio.run": (Hook("trackio", "Run", "log", ("metrics", "step"), _read_run, ("_next_step",)),),
    "mlflow": (
        Hook("mlflow", "", "log_metric", ("key", "value", "step"), _read_mlflow_metric),
        Hook("mlflow", "", "log_metrics", ("metrics", "step"), _read_mlflow_metrics),
    ),
    "transformers.trainer": (Hook("Trainer.log", "Trainer", "log", ("logs", "start_time"), _read_trainer),),
}


class HookedImports(MetaPathFinder):
    """Install the hooks of a module after its import."""

    def __init__(self, install: Callable[[ModuleType, tuple[Hook, ...]], None]) -> None:
        self._install = install
        self._is_searching = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        hooks = HOOKS.get(name)
        if hooks is None or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_searching = False
        execute = getattr(spec.loader, "exec_module", None) if spec else None
        if spec is None or spec.loader is None or execute is None:
            return spec

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._install(module, hooks)

        with contextlib.suppress(AttributeError):  # a loader without attributes
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def capture_metrics(metrics: MetricCollector, get_step: Callable[[], int]) -> Callable[[], None]:
    """Read the metrics of supported libraries from now on. The returned function removes the import hook."""

    def install(module: ModuleType, hooks: tuple[Hook, ...]) -> None:
        for hook in hooks:
            owner = getattr(module, hook.owner, None) if hook.owner else module
            original = getattr(owner, hook.name, None)
            if owner is not None and callable(original):
                setattr(owner, hook.name, _wrap(original, hook, metrics, get_step))

    for name, hooks in HOOKS.items():
        if name in sys.modules:
            install(sys.modules[name], hooks)
    finder = HookedImports(install)
    sys.meta_path.insert(0, finder)
    return lambda: sys.meta_path.remove(finder)


def _wrap(original: Any, hook: Hook, metrics: MetricCollector, get_step: Callable[[], int]) -> Any:
    has_warned = False

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_warned
        owner, rest = (args[0], args[1:]) if hook.owner and args else (None, args)
        run_step = next((getattr(owner, name) for name in hook.next_step if hasattr(owner, name)), None)
        result = original(*args, **kwargs)
        try:
            found = hook.read(
                owner, {**dict(zip(hook.parameters, rest, strict=False)), **kwargs, "_run_step": run_step}
            )
            metrics.add(hook.source, get_step() if found[0] is None else int(found[0]), found[1])
        except Exception as error:  # the call of the script succeeded, and must not fail here
            if not has_warned:
                has_warned = True
                print(f"meshboard: cannot read a call of {hook.source}: {error!r}"[:300], file=sys.stderr)
        return result

    return call
