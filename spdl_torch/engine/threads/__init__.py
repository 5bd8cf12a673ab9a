"""Threads: how they start and end, and the stacks of those that keep others waiting."""
