"""Pipelines and iterables that run entirely in a child process."""
