"""Pipelines and iterables that run whole in a child process."""
