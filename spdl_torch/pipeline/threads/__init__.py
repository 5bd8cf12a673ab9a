"""Threads: starting and joining them, and the stacks of those that keep others waiting."""
