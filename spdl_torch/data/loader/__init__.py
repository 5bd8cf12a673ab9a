"""``DataLoader`` and its iterators."""
