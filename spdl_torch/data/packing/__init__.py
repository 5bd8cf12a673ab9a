"""Batches by a budget of tokens, pixels or frames instead of a number of samples."""
