"""Whole programs, for the table ``program``.

``train`` is the program: a training script as people write it, in which the loader's import is all
that changes. ``fresh`` starts it in a process of its own and measures it from outside. ``plans``
lists what is trained, and how; it imports nothing heavy, since the parent process reads it.
"""
