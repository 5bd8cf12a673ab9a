"""Counters of stages and queues, and the figures computed from them."""
