"""The user's objects: what they hold, which of them can change, and copies of them.

One table of types (``kinds``) and one walker (``members``). What is decided by walking (what
threads may share, which generators a sample draws from, what cannot be pickled) is decided where it
is used.
"""
