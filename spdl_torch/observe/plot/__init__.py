"""Pictures of a statistics file."""
