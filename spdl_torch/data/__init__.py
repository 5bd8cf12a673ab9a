"""What trainers hold: the loader and datasets. Builds on the engine and on ``io``."""
