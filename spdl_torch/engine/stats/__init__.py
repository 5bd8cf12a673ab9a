"""Counters of stages and queues, and the statistics computed from them."""
