"""Run a program as Python itself would: as ``__main__``, with its own arguments, path and end."""

from __future__ import annotations

import builtins
import importlib.util
import os
import runpy
import sys
from contextlib import ExitStack
from importlib.machinery import SourceFileLoader
from pathlib import Path
from pkgutil import get_importer
from types import ModuleType
from typing import Any

_NOT_THE_USERS = (str(Path(__file__).parent), "<frozen ")

while_it_runs = ExitStack()
"""What ends with the program, while threads still run; not in a fork, which is not the one."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=while_it_runs.pop_all)


def run_program(words: list[str], *, is_module: bool) -> None:
    """Run a script, a folder or an archive with a ``__main__.py``, or a module with its arguments.

    What it raises comes through, SystemExit and Ctrl-C as well; Python then shows a traceback
    without the frames from here.
    """
    path = path_of(words[0])
    has_main = not is_module and get_importer(path) is not None
    if has_main or not sys.flags.safe_path:
        folder = os.getcwd() if is_module else os.path.dirname(os.path.realpath(path))
        sys.path[: not sys.flags.safe_path] = [path if has_main else folder]
    # Children of multiprocessing look there for the program, and what they send back of its classes
    # is looked for under the other name.
    main = sys.modules["__main__"] = sys.modules["__mp_main__"] = ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    sys.argv = ["-m" if is_module else words[0], *words[1:]]
    try:
        if is_module or has_main:  # as python does
            name = words[0] if is_module else "__main__"
            runpy._run_module_as_main(name, is_module)  # type: ignore[attr-defined]
        else:
            loader = SourceFileLoader("__main__", path)
            vars(main).update(__file__=path, __cached__=None, __loader__=loader)
            exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(main))
    except BaseException:
        sys.excepthook = _without_these_frames(sys.excepthook)
        raise
    finally:
        while_it_runs.close()


def path_of(program: str) -> str:
    """Return the path that Python shows of a program: from the root, the rest as it was given."""
    return os.path.join(os.getcwd(), program)


def _without_these_frames(hook: Any) -> Any:
    """Return a hook, Python's or the program's, that is shown the program's frames alone."""

    def show(kind: type[BaseException], error: BaseException, shown: Any) -> None:
        while shown is not None and shown.tb_frame.f_code is not run_program.__code__:
            shown = shown.tb_next
        while shown is not None and shown.tb_frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            shown = shown.tb_next
        hook(kind, error.with_traceback(shown), shown)

    return show


class after_torch:  # called like a function
    """Call ``then`` when torch has been imported, at once if it has been: a program may set
    environment variables first that torch reads at its import."""

    def __init__(self, then: Any) -> None:
        self._then = then
        if "torch" in sys.modules:
            then()
        else:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, *_: object) -> Any:
        """Return torch's spec, once; None for another module."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        if spec is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (load(module), self._then())
        return spec
