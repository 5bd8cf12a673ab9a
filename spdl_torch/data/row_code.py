"""Which ``__getitem__`` does nothing but take one row of each of some attributes.

Such a method is recognised by its compiled code: it has to be, instruction for instruction, what
Python makes of one of the few forms here. A call, a condition or a third argument makes other code.
So does a line added for debugging, and the method is called again.
"""

from __future__ import annotations

import inspect
from functools import lru_cache, partial
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    _Build = Callable[[list[Any]], Any]
    _Form = tuple[str, _Build, _Build]

__all__ = ["RowForm", "row_form"]

_COMPARED = (
    *("co_code", "co_consts", "co_names", "co_varnames", "co_freevars", "co_cellvars"),
    *("co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_exceptiontable"),
)
_MORE_ARGUMENTS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


class RowForm(NamedTuple):
    """What a sample is made of."""

    names: tuple[str, ...]
    """The attributes, ``self.NAME[index]`` each."""
    column: Callable[[list[Any]], Any]
    """What ``default_collate`` is given as one attribute's part of all samples: list or tuple."""
    batch_of: Callable[[list[Any]], Any]
    """From the collated column of each attribute: what ``default_collate`` makes of samples."""


def row_form(kind: type) -> RowForm | None:
    """Of datasets of this class; None for any other ``__getitem__``."""
    method = inspect.getattr_static(kind, "__getitem__", None)
    asked = inspect.getattr_static(kind, "__getattribute__")
    if type(method) is not FunctionType or asked is not object.__getattribute__:
        return None
    form = _form_of(method.__code__, method.__doc__)
    if form is None or any(hasattr(kind, name) for name in form.names):  # perhaps a property
        return None
    return form


@lru_cache(maxsize=64)
def _form_of(code: CodeType, doc: str | None) -> RowForm | None:
    if code.co_argcount != 2 or code.co_flags & _MORE_ARGUMENTS or not code.co_names:
        return None
    head = f"def take({', '.join(code.co_varnames[:2])}):\n  "
    if doc is not None:  # it is one of the constants
        head += f"{doc!r}\n  "
    for text, column, batch_of in _forms(code, doc):
        module = compile(head + text, "<form of a dataset>", "exec")
        form = next(each for each in module.co_consts if isinstance(each, CodeType))
        if all(getattr(form, name) == getattr(code, name) for name in _COMPARED):
            return RowForm(code.co_names, column, batch_of)
    return None


def _forms(code: CodeType, doc: str | None) -> Iterator[_Form]:
    """``return self.x[i]``, ``return self.x[i], self.y[i]``, the same in a list or in a dict with
    strings for keys; or with every row given a name first.
    """
    me, index, *local = code.co_varnames
    rows = [f"{me}.{name}[{index}]" for name in code.co_names]
    keys = [key for key in _strings(code.co_consts) if key != doc]
    if not local:
        yield from _returns(rows, keys)
    elif len(local) == len(rows):
        named = "\n  ".join(f"{name} = {row}" for name, row in zip(local, rows, strict=True))
        for text, column, batch_of in _returns(local, keys):
            yield f"{named}\n  {text}", column, batch_of


def _returns(values: Sequence[str], keys: Sequence[str]) -> Iterator[_Form]:
    if len(values) == 1:
        yield f"return {values[0]}", list, lambda columns: columns[0]
    yield f"return ({', '.join(values)},)", tuple, list
    yield f"return [{', '.join(values)}]", tuple, list
    if len(keys) == len(set(keys)) == len(values):
        items = (f"{key!r}: {value}" for key, value in zip(keys, values, strict=True))
        named = partial(_named, keys)
        yield f"return {{{', '.join(items)}}}", list, named


def _named(keys: Sequence[str], columns: list[Any]) -> dict[str, Any]:
    return dict(zip(keys, columns, strict=True))


def _strings(constants: Sequence[Any]) -> Iterator[str]:
    for each in constants:
        if isinstance(each, str):
            yield each
        elif isinstance(each, tuple):
            yield from _strings(each)
