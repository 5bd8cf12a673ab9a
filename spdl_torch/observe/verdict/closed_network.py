"""A closed queueing network: customers that cycle between one server and a delay without a queue.

The customers are workers, the server is the resource that they share (a GIL, the cores as one), and
the rest of a batch's time passes without it. Mean value analysis gives the rate if times are
exponentially distributed; if they do not vary at all, it is the smaller of two bounds.
"""

from __future__ import annotations

import math


def most_rate(num_customers: int, service: float, think: float) -> float:
    """Return the rate, cycles a second, of customers that wait for each other only if they must.

    service, think: seconds at the server and elsewhere, in one cycle.
    """
    if service <= 0:
        return num_customers / think if think > 0 else math.inf
    return min(num_customers / (service + think), 1 / service)


def random_rate(num_customers: int, service: float, think: float) -> float:
    """Return the rate, cycles a second, if times are random: exact for exponential ones."""
    if service <= 0:
        return num_customers / think if think > 0 else math.inf
    waiting = rate = 0.0
    for number in range(1, num_customers + 1):
        at_server = service * (1 + waiting)
        rate = number / (at_server + think)
        waiting = rate * at_server
    return rate
