"""Hooks and queues that users subclass to export statistics, and the thread that calls them."""
