"""The state of loading, which can be saved and restored."""
