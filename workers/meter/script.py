"""Find a training script of the user, and run it as Python would."""

from __future__ import annotations

import builtins
import importlib.util
import json
import os
import runpy
import signal
import sys
from collections.abc import Callable
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from io import open_code
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

from planner.facts.parse_spec import parse_spec
from planner.facts.spec import ScriptSpec
from planner.facts.validation import SpecError
from workers.meter.rank_exit import fail, report_error, report_exception

OWN_PACKAGES = ("contracts", "planner", "workers")
COMPILED_SUFFIXES = (".pyc", ".pyz", ".zip")
_KIND_HINTS: dict[Callable[[Path], bool], str] = {
    Path.is_file: "a folder. Use a file.",
    Path.is_dir: "a file. Use a folder.",
}


class ScriptError(Exception):
    """The requested script does not exist. The message names the field."""


class Script(NamedTuple):
    """A script to run."""

    file: Path | None  # None if Python finds the module
    module: str | None  # None if the script was requested by path
    name: str  # sys.argv[0]
    arguments: list[str]
    search: Path  # first entry of sys.path
    cwd: Path | None  # None for the current directory


def find_script(name: str, arguments: list[str], *, is_module: bool) -> Script:
    """Find a script as `python NAME` and `python -m NAME` do. Raises ScriptError."""
    here = Path.cwd()
    if is_module:
        return Script(None, name, name, arguments, here, None)
    file = Path(name).absolute()
    if file.is_dir():
        raise ScriptError(f"`script.path` is {name!r}, which is a folder. Use a file.")
    if not file.is_file():
        raise ScriptError(f"`script.path` is {name!r}, which does not exist.")
    return Script(file, None, name, arguments, file.resolve().parent, None)


def find_script_of_spec(spec_file: Path, root: Path) -> Script:
    """Find the script of a job spec below `root`. A link that leaves `root` counts as missing. Raises ScriptError."""
    requested, root = _read_script_spec(spec_file), root.resolve()
    if requested.module is not None:
        file, search = _find_module_file(requested.module, root), root
    else:
        file = _find_below(root, requested.path or "", Path.is_file, "script.path")
        search = file.parent
    default_cwd = search if requested.upload is None else root
    cwd = default_cwd if requested.cwd is None else _find_below(root, requested.cwd, Path.is_dir, "script.cwd")
    if (
        requested.upload is None and requested.module is None and not cwd.is_relative_to(search)
    ):  # through a link, which the validation of the spec cannot see
        own = str(search.relative_to(root))
        raise ScriptError(f"`script.cwd` is {requested.cwd!r}, which is outside the script folder {own!r}.")
    return Script(file, requested.module, str(file), requested.args, search, cwd)


def find_command_folder(spec_file: Path, root: Path) -> tuple[str, Path]:
    """Return the command of a job spec, and its working directory below `root`. Raises ScriptError."""
    requested = _read_script_spec(spec_file)
    if requested.command is None:
        raise ScriptError("`script.command` is missing in the spec.")
    return requested.command, _find_below(root, requested.cwd or ".", Path.is_dir, "script.cwd")


def run_script(script: Script, prepare: Callable[[], None] = lambda: None) -> int:
    """Run a script as the main program, and return its exit code, or -N for the end by signal N.

    Args:
        prepare: Called when Python's path and the current directory are those of the script.
    """
    sys.argv = [script.name, *script.arguments]
    sys.path[0] = str(script.search)
    if script.cwd is not None:
        os.chdir(script.cwd)
    _unload_shadowing_packages()
    prepare()
    try:
        _execute(script)
    except ScriptError as error:
        return fail(str(error), 2)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        report_error(str(end.code))
        return 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        error.__traceback__ = trace  # without the frames of this module
        sys.last_value = error  # for exit handlers
        if not isinstance(error, KeyboardInterrupt):
            report_exception(error)
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _unload_shadowing_packages() -> None:
    """Let packages of the script shadow Meshboard's packages of equal name. Loaded code continues to work."""
    for name in OWN_PACKAGES:
        own = {module: sys.modules.pop(module) for module in list(sys.modules) if module.partition(".")[0] == name}
        found = importlib.util.find_spec(name)
        if found is None or found.origin == own[name].__file__:
            sys.modules.update(own)


def _execute(script: Script) -> None:
    """Execute a script in a module that stays `__main__`, because its threads and exit handlers look for it there."""
    if script.file is not None and script.file.suffix in COMPILED_SUFFIXES:
        runpy.run_path(str(script.file), run_name="__main__")
        return
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __cached__=None)
    code = _compile_module(script.module, script.file, main) if script.module else _compile_file(script.file, main)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)  # noqa: S102 - runs the script of the user


def _compile_file(file: Path | None, main: ModuleType) -> CodeType:
    main.__file__ = str(file)
    with open_code(str(file)) as opened:
        return compile(opened.read(), str(file), "exec", dont_inherit=True)


def _compile_module(name: str, file: Path | None, main: ModuleType) -> CodeType:
    """Compile a module.

    Args:
        file: Expected file, or None for any.
    """
    found = _find_module(name, is_package=None if file is None else file.name == "__main__.py")
    where = found.origin if found else None
    if file is not None and not (where and file.samefile(where)):
        raise ScriptError(
            f"`script.module` is {name!r} in {str(file)!r}, but Python finds {where or 'no such module'}."
        )
    if found is None or where is None or not isinstance(found.loader, InspectLoader):
        raise ScriptError(f"`script.module` is {name!r}, but Python finds no such module that it can run.")
    sys.argv[0] = where
    main.__dict__.update(__spec__=found, __loader__=found.loader, __package__=found.parent, __file__=where)
    main.__dict__.update(__cached__=found.cached)
    code: CodeType | None = found.loader.get_code(found.name)
    assert code is not None, "it is not a package"
    return code


def _find_module(name: str, *, is_package: bool | None) -> ModuleSpec | None:
    """Find a module, or the __main__ of a package. This imports the parent packages.

    Args:
        is_package: None if unknown.
    """
    try:
        found = None if is_package else importlib.util.find_spec(name)
        if is_package is None:
            is_package = found is not None and found.submodule_search_locations is not None
        return importlib.util.find_spec(f"{name}.__main__") if is_package else found
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a parent package imports another missing module
        return None


def _read_script_spec(spec_file: Path) -> ScriptSpec:
    try:
        requested = parse_spec(json.loads(spec_file.read_text())).script
    except (OSError, ValueError, SpecError) as error:
        raise ScriptError(f"`--spec` is invalid: {error}") from None
    if requested is None:
        raise ScriptError("`script` is missing in the spec.")
    return requested


def _find_below(root: Path, name: str, has_kind: Callable[[Path], bool], field: str) -> Path:
    found = _resolve_below(root, root / name, has_kind)
    if found is None and _resolve_below(root, root / name, Path.exists):
        raise ScriptError(f"`{field}` is {name!r}, which is {_KIND_HINTS[has_kind]}")
    if found is None:
        raise ScriptError(f"`{field}` is {name!r}, which does not exist below the script root.")
    return found


def _find_module_file(module: str, root: Path) -> Path:
    """Return the file that `python -m MODULE` runs in `root`. For a package, this is its __main__."""
    path = root.joinpath(*module.split("."))
    for file in (path / "__main__.py", path.with_name(f"{path.name}.py")):
        if _resolve_below(root, file, Path.is_file):
            return file
    raise ScriptError(f"`script.module` is {module!r}, which does not exist below the script root.")


def _resolve_below(root: Path, path: Path, has_kind: Callable[[Path], bool]) -> Path | None:
    """Resolve the links of a path. Return None outside `root`, or if the target does not exist."""
    try:
        found = path.resolve()
        return found if found.is_relative_to(root.resolve()) and has_kind(found) else None
    except (OSError, ValueError, RuntimeError):  # an overlong name, a lone surrogate, a cycle of links
        return None
