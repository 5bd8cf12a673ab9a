"""Several datasets as one, mixed in given proportions by a plan."""
