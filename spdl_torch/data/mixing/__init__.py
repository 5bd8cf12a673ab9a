"""Several datasets as one, in proportions that a plan keeps exactly."""
