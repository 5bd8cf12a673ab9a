"""Public names that a package imports when they are first used: in the middle of a user's program,
and so without setting off the collector.

A module makes thousands of objects that live on. Python counts them, collects garbage every 700 of
them, and after some such collections goes through everything: 100 to 250 ms over what torch's
import left, in the first ``iter()`` of a loader. None of it is garbage. So collections wait for the
end of an import, and count as one.

The collector's switch is the process's: another thread that switches it off within these 50 ms
finds it on afterwards.
"""

from __future__ import annotations

import dis
import functools
import gc
import importlib
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

from .locks import in_forked_child
from .scopes import scope


def hand_on() -> None:
    """Give the package that calls this its public names: those that it imports from parts of
    itself, for type checkers in a block that never runs, or at once.

    The others are imported when they are first used, and left in the package. ``__all__`` and
    ``dir()`` have them all. What the block imports is read from the package's compiled code, which
    has it although it does not run.
    """
    names = sys._getframe(1).f_globals
    package = names["__name__"]
    homes = _homes_of(sys._getframe(1).f_code)

    def find(name: str) -> Any:
        names[name] = value = import_name(package, homes, name)
        return value

    public = {name for name, home in homes.items() if not home.endswith(".")}  # without modules
    names["__all__"] = sorted(public | {"__version__"} & names.keys())
    names["__getattr__"] = find
    names["__dir__"] = lambda: sorted({*names, *homes})


def _homes_of(code: CodeType) -> dict[str, str]:
    """Return the modules from which a package imports, relative to it, by what it imports."""
    homes = {}
    before: deque[Any] = deque(maxlen=2)  # what is on the stack: the level, and the names
    for each in dis.get_instructions(code):
        if each.opname == "IMPORT_NAME" and before[0]:
            homes.update(dict.fromkeys(before[1], "." * before[0] + each.argval))
        before.append(each.argval)
    return homes


def import_name(package: str, homes: Mapping[str, str], name: str) -> Any:
    """Import a package's public name from its home.

    homes: relative names of the modules, by the public names; of a module itself, where it is.
    Raises:
        AttributeError: it has no home, as for any other module. For a name that is left out on
            purpose, the message says what to use instead.
        ImportError: the same, where ``from package import name`` asks for a name that is left out:
            Python would drop an AttributeError and its message.
    """
    if name not in homes:
        text = f"module {package!r} has no attribute {name!r}"
        hint = all_left_out().get(package, {}).get(name)
        if hint is None:
            raise AttributeError(text)
        # For `from package import name` the machinery of imports asks the package's __getattr__.
        if sys._getframe(2).f_code.co_name == "_handle_fromlist":
            raise ImportError(f"cannot import name {name!r} from {package!r}. {hint}", name=package)
        raise AttributeError(f"{text}. {hint}")
    home = homes[name]
    with collected_later():
        if home.endswith("."):
            return importlib.import_module(home + name, package)
        return getattr(importlib.import_module(home, package), name)


@functools.cache
def all_left_out() -> dict[str, dict[str, str]]:
    """Return SPDL's names that are left out, by the module or class that is without them, and what
    to use instead: the last sentence of the error.

    In the file each home has sentences, and these the names of which they are said.
    """
    found: dict[str, dict[str, str]] = {}
    home = said = ""
    for line in Path(__file__).with_name("left_out.txt").read_text("ascii").splitlines():
        if line.startswith(" "):
            found.setdefault(home, {}).update(dict.fromkeys(line.split(), said))
        elif " " in line:
            said = line
        elif line:
            home = line
    return found


_is_off_by_us = False


@scope
def collected_later() -> Iterator[None]:
    """Let no garbage be collected in the block, which only imports. Of several blocks, one within
    another or on several threads, the one that switched the collector off switches it on."""
    global _is_off_by_us
    if not gc.isenabled():
        yield
        return
    try:  # from here on: Ctrl-C may come anywhere
        _is_off_by_us = True
        gc.disable()
        yield
    finally:
        gc.enable()
        _is_off_by_us = False


@in_forked_child
def _switch_on() -> None:
    """Let a child collect that another thread forked meanwhile: nobody else in it would."""
    global _is_off_by_us
    if _is_off_by_us:
        gc.enable()
        _is_off_by_us = False
