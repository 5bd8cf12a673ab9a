"""Few rows of a table of options in which all pairs of values can be seen."""

import itertools

import pytest


def pairs_of(row):
    """The values of a row at all choices of two columns."""
    return set(itertools.combinations(enumerate(row), 2))


def covering(rows):
    """Few of the rows, with every pair of values that any of them has: each is the one that has the
    most new ones."""
    missing, chosen = {row: pairs_of(row) for row in rows}, set()
    while missing:
        best = max(missing, key=lambda row: len(missing[row]))
        chosen.add(best)
        covered = missing.pop(best)
        missing = {row: rest for row, own in missing.items() if (rest := own - covered)}
    return chosen


def by_pairs(**values):
    """Parametrize a test by these names, each with its values: as many rows as it takes for every
    value to meet every value of each other name. The other rows of the table are long forms.

    A value may be a ``pytest.param`` with an id and marks, which the rows with it have.
    """
    columns = [[_param(value) for value in each] for each in values.values()]
    rows = {}
    for numbers in itertools.product(*(range(len(column)) for column in columns)):
        rows[numbers] = [column[n] for column, n in zip(columns, numbers, strict=True)]
    short = covering([numbers for numbers, cells in rows.items() if not _marks_of(cells)])
    given = []
    for numbers, cells in rows.items():
        marks = _marks_of(cells) or ([] if numbers in short else [pytest.mark.long])
        name = "-".join(cell.id for cell in cells)
        given.append(pytest.param(*(cell.values[0] for cell in cells), id=name, marks=marks))
    return pytest.mark.parametrize(tuple(values), given)


def _param(value):
    """The same as a ``pytest.param`` with an id."""
    if hasattr(value, "marks") and hasattr(value, "id"):
        return value
    return pytest.param(value, id=getattr(value, "__name__", str(value)))


def _marks_of(cells):
    return [mark for cell in cells for mark in cell.marks]
