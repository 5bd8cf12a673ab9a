"""Datasets as tutorials and repositories write them, for the table ``ordinary``.

``catalogue`` lists them. The other modules hold the datasets by kind; only the process that loads a
dataset imports them. Each dataset has a function ``(folder, count)`` that
writes its data where it is missing and returns the arguments of a ``DataLoader``. Libraries that
are not dependencies of ours are imported in the function that uses them.

Nothing here is tuned for a loader: a dataset is a plain class at module level, without
``__getitems__``, with its handles opened as its library's documentation advises.
"""
