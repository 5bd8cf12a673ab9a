"""``python -m spdl_torch run``: a program of the user's, with our loader in place of torch's."""
