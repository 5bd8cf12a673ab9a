"""Hooks and queues that users subclass to export figures, and the thread that calls them."""
