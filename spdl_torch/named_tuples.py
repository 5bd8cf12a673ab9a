"""``NamedTuple`` for the classes that an import makes: the same tuples, without compiling anything.

``typing.NamedTuple`` compiles each annotation, and the text of a constructor: 0.2 to 0.3 ms a
class, of which there are some fifty on the way to a loader's first batch. Here a class takes
0.02 ms: annotations stay text, and classes with the same number of fields share a constructor's
code. Type checkers take it for typing's.
"""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import CodeType
    from typing import NamedTuple as NamedTuple, Self

try:
    from _collections import _tuplegetter as _field  # type: ignore[import-not-found]
except ImportError:  # not CPython
    from operator import itemgetter

    def _field(index: int, doc: str) -> Any:
        return property(itemgetter(index), doc=doc)


class _Methods(tuple[Any, ...]):
    """The methods of each named tuple. They are copied and not inherited: torch, among others,
    takes for one only a class whose one base is ``tuple``."""

    _fields: tuple[str, ...]

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Self:
        """Return a tuple of these values. Raises: TypeError: they are too few, or too many."""
        made = tuple.__new__(cls, iterable)
        if len(made) != len(cls._fields):
            raise TypeError(f"{cls.__name__} has {len(cls._fields)} fields, got {len(made)} values")
        return made

    def _replace(self, /, **changed: Any) -> Self:
        """Return a copy in which some fields have other values. Raises: ValueError: a name that is
        no field's."""
        made = self._make(map(changed.pop, self._fields, self))
        if changed:
            raise ValueError(f"{type(self).__name__} has no field {list(changed)!r}")
        return made

    def _asdict(self) -> dict[str, Any]:
        """Return the values by the names of their fields."""
        return dict(zip(self._fields, self, strict=True))

    def __repr__(self) -> str:
        """Return the class's name, and each field with its value."""
        values = ", ".join(f"{n}={value!r}" for n, value in zip(self._fields, self, strict=True))
        return f"{type(self).__name__}({values})"

    def __getnewargs__(self) -> tuple[Any, ...]:
        """Return the constructor's arguments, for copies and pickles."""
        return tuple(self)


_COPIED = ("_make", "_replace", "_asdict", "__repr__", "__getnewargs__")
_methods = {name: vars(_Methods)[name] for name in _COPIED}


class _Maker(type):
    """The metaclass of ``NamedTuple`` alone: classes that derive from that are plain ones."""

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
        if len(bases) != 1:
            raise TypeError(f"{name}: a named tuple has no other base, got {bases}")
        annotations = body.get("__annotations__", {})
        fields, defaults = tuple(annotations), {}
        for field in fields:
            if field in body:
                defaults[field] = body[field]
            elif defaults:
                raise TypeError(f"{name}: the field {field} has no default, and follows one with")
        new = FunctionType(
            _code_of_new(len(fields)).replace(co_varnames=("_cls", *fields)),
            {"_tuple_new": tuple.__new__, "__builtins__": {}, "__name__": body["__module__"]},
            "__new__",
            tuple(defaults.values()),
        )
        new.__qualname__ = f"{name}.__new__"
        new.__annotations__ = annotations
        made = {
            "__doc__": f"{name}({', '.join(fields)})",
            **_methods,
            **body,
            "__slots__": (),
            "__new__": new,
            "__match_args__": fields,
            "_fields": fields,
            "_field_defaults": defaults,
        }
        for index, field in enumerate(fields):
            made[field] = _field(index, f"Alias for field number {index}")
        return type(name, (tuple,), made)


@cache
def _code_of_new(num_fields: int) -> CodeType:
    """Return the code of a constructor with so many fields, whose names are yet to be given."""
    names = [f"field{number}" for number in range(num_fields)]
    values = "".join(f"{name}, " for name in names)
    function = eval(f"lambda {', '.join(['_cls', *names])}: _tuple_new(_cls, ({values}))")
    code: CodeType = function.__code__
    return code.replace(co_name="__new__")


if not TYPE_CHECKING:
    NamedTuple = type.__new__(_Maker, "NamedTuple", (), {"__module__": __name__})
