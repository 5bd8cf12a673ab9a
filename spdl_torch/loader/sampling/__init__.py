"""The samples of each rank, and their order."""
