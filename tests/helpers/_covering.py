"""Few rows of a table of options in which all of its pairs, or triples, of values can be seen."""

import itertools

import pytest


def tuples_of(row, strength):
    """The values of a row at all choices of so many columns."""
    return set(itertools.combinations(enumerate(row), strength))


def covering(rows, strength):
    """Few of the rows, with every tuple of values that any of them has: each is the one that has
    the most new ones."""
    missing = {row: tuples_of(row, strength) for row in rows}
    chosen = []
    while missing:
        best = max(missing, key=lambda row: len(missing[row]))
        chosen.append(best)
        covered = missing.pop(best)
        missing = {row: rest for row, own in missing.items() if (rest := own - covered)}
    return chosen


def by_pairs(**values):
    """Parametrize a test by these names, each with its values: as many rows as it takes for every
    value to meet every value of each other name. The other rows of the table are long forms.

    A value may be a ``pytest.param`` with an id and marks, which the rows with it have.
    """
    columns = [[_param(value) for value in each] for each in values.values()]
    rows = list(itertools.product(*(range(len(column)) for column in columns)))
    short = set(covering([row for row in rows if not _is_long(columns, row)], 2))
    given = []
    for row in rows:
        cells = [column[number] for column, number in zip(columns, row, strict=True)]
        marks = [mark for cell in cells for mark in cell.marks]
        if row not in short and not _is_long(columns, row):
            marks.append(pytest.mark.long)
        name = "-".join(cell.id for cell in cells)
        given.append(pytest.param(*(cell.values[0] for cell in cells), id=name, marks=marks))
    return pytest.mark.parametrize(tuple(values), given)


def _param(value):
    """The same as a ``pytest.param`` with an id."""
    if hasattr(value, "marks") and hasattr(value, "id"):
        return value
    return pytest.param(value, id=getattr(value, "__name__", str(value)))


def _is_long(columns, row):
    cells = (column[number] for column, number in zip(columns, row, strict=True))
    return any(mark.name == "long" for cell in cells for mark in cell.marks)
