"""Bounded queues, the only place where the engine waits, and what passes through them."""
