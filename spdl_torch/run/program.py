"""Run a program as Python itself would: as ``__main__``, with its own arguments, path and end."""

from __future__ import annotations

import builtins
import os
import runpy
import sys
from contextlib import ExitStack
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from pkgutil import get_importer
from types import ModuleType
from typing import Any

_NOT_THE_USERS = (str(Path(__file__).parent), "<frozen ")

while_it_runs = ExitStack()
"""What ends with the program, while threads still run."""


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
        with while_it_runs:
            if is_module or has_main:  # as python does
                name = words[0] if is_module else "__main__"
                runpy._run_module_as_main(name, is_module)  # type: ignore[attr-defined]
            else:
                is_compiled = path.endswith(".pyc")
                kind = SourcelessFileLoader if is_compiled else SourceFileLoader
                loader = kind("__main__", path)
                vars(main).update(__file__=path, __cached__=None, __loader__=loader)
                if is_compiled:
                    code: Any = loader.get_code("__main__")
                else:
                    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
                exec(code, vars(main))
    except BaseException as error:
        shown, hook = error.__traceback__, sys.excepthook  # Python's, or the program's
        while shown is not None and shown.tb_frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            shown = shown.tb_next
        sys.excepthook = lambda kind, error, _: hook(kind, error.with_traceback(shown), shown)
        raise


def path_of(program: str) -> str:
    """Return the path that Python shows of a program: from the root, the rest as it was given."""
    return os.path.join(os.getcwd(), program)
