"""Bounded queues, the only place where the engine waits."""
