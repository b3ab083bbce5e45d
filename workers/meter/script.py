"""A script of the user's own: where it lies, and running it as Python would."""

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

OURS = ("contracts", "planner", "workers")
NOT_SOURCE = (".pyc", ".pyz", ".zip")


class ScriptError(Exception):
    """What was asked for is not there, in words that name the field."""


class Script(NamedTuple):
    """What to run: the file, and the module's name where it was asked for by that.

    `file`: None where Python finds the module. `search`: first on sys.path. `cwd`: None to stay where we are.
    """

    file: Path | None
    module: str | None
    name: str
    arguments: list[str]
    search: Path
    cwd: Path | None


def find_script(name: str, arguments: list[str], *, is_module: bool) -> Script:
    """As `python NAME arguments` and `python -m NAME arguments` find it.

    Raises:
        NoScriptError: when there is none.
    """
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
    """What a job's spec names, all of which lies below `root`: a link out of it is as good as none.

    Raises:
        NoScriptError: when it does not.
    """
    wanted, root = _ordered(spec_file), root.resolve()
    if wanted.module is not None:
        file, search = _module_file(wanted.module, root), root
    else:
        file = _below(root, wanted.path or "", Path.is_file, "script.path")
        search = file.parent
    cwd = search if wanted.cwd is None else _below(root, wanted.cwd, Path.is_dir, "script.cwd")
    if wanted.module is None and not cwd.is_relative_to(search):  # by a link: the spec's own rule sees none
        own = str(search.relative_to(root))
        raise ScriptError(f"`script.cwd` is {wanted.cwd!r}, which is outside the script folder {own!r}.")
    return Script(file, wanted.module, str(file), wanted.args, search, cwd)


def run_script(script: Script) -> int:
    """Run it as the main program; the exit code that Python would give it, -N where that would end it by signal N."""
    sys.argv = [script.name, *script.arguments]
    sys.path[0] = str(script.search)
    if script.cwd is not None:
        os.chdir(script.cwd)
    _give_way()
    try:
        _start(script)
    except ScriptError as error:
        return fail(str(error), 2)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        report_error(str(end.code))
        return 1
    except BaseException as error:
        _forget_ours(error)
        if not isinstance(error, KeyboardInterrupt):
            report_exception(error)
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _give_way() -> None:
    """A package of the script's may be called as one of ours: then it finds its own. What is loaded of ours stays."""
    for name in OURS:
        ours = {known: sys.modules.pop(known) for known in list(sys.modules) if known.partition(".")[0] == name}
        found = importlib.util.find_spec(name)
        if found is None or found.origin == ours[name].__file__:
            sys.modules.update(ours)


def _start(script: Script) -> None:
    """It stays the main module to the end of the process: its threads and what it does at exit look for it there."""
    if script.file is not None and script.file.suffix in NOT_SOURCE:
        runpy.run_path(str(script.file), run_name="__main__")
        return
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __cached__=None)
    code = _code_of_module(script.module, script.file, main) if script.module else _code_of_file(script.file, main)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)  # noqa: S102 - to run it is what we are asked for


def _code_of_file(file: Path | None, main: ModuleType) -> CodeType:
    main.__file__ = str(file)
    with open_code(str(file)) as opened:
        return compile(opened.read(), str(file), "exec", dont_inherit=True)


def _code_of_module(name: str, file: Path | None, main: ModuleType) -> CodeType:
    """`file`: where it must lie, None for anywhere."""
    found = _find(name, is_package=None if file is None else file.name == "__main__.py")
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


def _find(name: str, *, is_package: bool | None) -> ModuleSpec | None:
    """A module, of a package its __main__; `is_package` where that is known. Imports what it lies in."""
    try:
        found = None if is_package else importlib.util.find_spec(name)
        if is_package is None:
            is_package = found is not None and found.submodule_search_locations is not None
        return importlib.util.find_spec(f"{name}.__main__") if is_package else found
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # what it lies in wants something else
        return None


def _forget_ours(error: BaseException) -> None:
    """Let its traceback begin where Python's own would."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace


def _ordered(spec_file: Path) -> ScriptSpec:
    try:
        wanted = parse_spec(json.loads(spec_file.read_text())).script
    except (OSError, ValueError, SpecError) as error:
        raise ScriptError(f"`--spec` is invalid: {error}") from None
    if wanted is None:
        raise ScriptError("`script` is missing in the spec.")
    return wanted


def _below(root: Path, name: str, is_there: Callable[[Path], bool], field: str) -> Path:
    found = _inside(root, root / name, is_there)
    if found is None and _inside(root, root / name, Path.exists):
        raise ScriptError(f"`{field}` is {name!r}, which is {_OTHERWISE[is_there]}")
    if found is None:
        raise ScriptError(f"`{field}` is {name!r}, which does not exist below the script root.")
    return found


_OTHERWISE: dict[Callable[[Path], bool], str] = {
    Path.is_file: "a folder. Use a file.",
    Path.is_dir: "a file. Use a folder.",
}


def _module_file(module: str, root: Path) -> Path:
    """The file that `python -m module` would run in `root`: of a package, its __main__."""
    place = root.joinpath(*module.split("."))
    for file in (place / "__main__.py", place.with_name(f"{place.name}.py")):
        if _inside(root, file, Path.is_file):
            return file
    raise ScriptError(f"`script.module` is {module!r}, which does not exist below the script root.")


def _inside(root: Path, path: Path, is_there: Callable[[Path], bool]) -> Path | None:
    """Where a path really leads, None when that is outside `root` or nowhere."""
    try:
        found = path.resolve()
        return found if found.is_relative_to(root.resolve()) and is_there(found) else None
    except (OSError, ValueError, RuntimeError):  # a name too long, half a character, a circle of links
        return None
