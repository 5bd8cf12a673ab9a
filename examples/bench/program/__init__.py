"""Whole programs, for the table ``program``.

``train`` is the program: a training script as people write it, in which the loader's import is all
that changes. ``plans`` lists what is trained, and how. Nothing else of ours is imported in the
program, whose imports are measured.
"""
