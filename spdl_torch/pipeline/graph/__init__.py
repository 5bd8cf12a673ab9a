"""Where queues branch, and where they join again."""
