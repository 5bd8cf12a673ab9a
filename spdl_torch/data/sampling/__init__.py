"""Which samples each rank has, and in what order."""
