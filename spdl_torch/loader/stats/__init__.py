"""What a loader counts of itself."""
