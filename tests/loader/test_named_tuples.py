"""Named tuples that compile nothing are what typing makes of the same class."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
import typing

import pytest
from _house import ROOT
from hypothesis import given, strategies as st

from spdl_torch.named_tuples import NamedTuple

BODY = '''
from __future__ import annotations

class {name}(NamedTuple):
    """A class of {name}."""
{fields}
    CONSTANT = 3

    def twice(self):
        """Return it twice."""
        return (*self, *self)

    @property
    def size(self):
        return len(self)

    def __format__(self, how):
        return how + str(self)
'''


def class_of(named_tuple, names, num_defaults):
    """The class with these fields, the last of which have defaults, that ``named_tuple`` makes."""
    first = len(names) - num_defaults
    fields = [
        f"    {name}: Unknown[{n}]{f' = {n}' if n >= first else ''}" for n, name in enumerate(names)
    ]
    world = {"NamedTuple": named_tuple, "__name__": __name__}
    exec(BODY.format(name="Made", fields="\n".join(fields)), world)
    return world["Made"]


def outcome(call):
    """What a call returns, or the kind of what it raises."""
    try:
        return call()
    except Exception as error:
        return type(error)


NAMES = st.lists(st.sampled_from(["a", "b", "number", "x_1", "self", "count"]), unique=True)


@given(NAMES, st.data())
def test_named_tuples_are_those_of_typing(names, data):
    """Their values, methods, errors and what can be asked of the class, with any fields."""
    num_defaults = data.draw(st.integers(0, len(names)))
    ours, theirs = (class_of(each, names, num_defaults) for each in (NamedTuple, typing.NamedTuple))
    given_values = data.draw(st.lists(st.integers(), max_size=len(names) + 1))
    by_name = data.draw(st.dictionaries(st.sampled_from([*names, "other"]), st.integers()))

    def seen(kind):
        made = outcome(lambda: kind(*given_values, **by_name))
        changed = outcome(lambda: made._replace(**by_name)) if isinstance(made, kind) else None
        if isinstance(made, kind):
            assert made == tuple(made)
            assert hash(made) == hash(tuple(made))
            assert copy.copy(made) == copy.deepcopy(made) == made
            assert not hasattr(made, "__dict__")
            made = made, repr(made), made._asdict(), made.twice(), made.size, f"{made:<}"
        return made, changed, outcome(lambda: kind._make(given_values)), repr(kind)

    assert seen(ours) == seen(theirs)
    for name in ("__bases__", "__match_args__", "__doc__", "_fields", "_field_defaults"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert [*inspect.signature(ours).parameters] == [*inspect.signature(theirs).parameters] == names
    assert [getattr(ours, name).__doc__ for name in names] == [
        getattr(theirs, name).__doc__ for name in names
    ]


class Kept(NamedTuple):
    """One of a module, as pickle needs it."""

    number: int
    text: str = ""


def test_named_tuples_are_pickled_by_name():
    """With every protocol; what arrives is of the same class."""
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(Kept(3, text="x"), protocol))
        assert again == (3, "x")
        assert type(again) is Kept


def test_field_without_default_after_one_with_is_refused():
    """As typing refuses it, when the class is made."""
    with pytest.raises(TypeError, match="Made: the field b has no default, and follows one with"):
        exec("class Made(NamedTuple):\n    a: int = 1\n    b: int", {**globals()})


def test_second_base_is_refused():
    """A named tuple has tuple alone, or some libraries would not take it for one."""
    with pytest.raises(TypeError, match="Made: a named tuple has no other base"):
        exec("class Made(NamedTuple, Kept):\n    a: int", {**globals()})


def test_package_makes_no_other_named_tuples():
    """Each would take ten times as long, most before the first batch."""
    others = [
        f"{path}:{node.lineno}"
        for path in (ROOT / "spdl_torch").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and path.name != "named_tuples.py"
        if any(alias.name in ("NamedTuple", "namedtuple") for alias in node.names)
        if node.module in ("typing", "collections")
    ]
    assert others == []
