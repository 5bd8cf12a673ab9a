"""What the commands' parsers share: kinds of values, and the error that ends a command."""

from __future__ import annotations

from argparse import ArgumentTypeError


class CommandError(Exception):
    """Ends a command with one message and an exit status; nothing of the program has failed."""

    def __init__(self, message: object, status: int = 2) -> None:
        super().__init__(str(message))
        self.status = status


def whole_number(text: str) -> int:
    """Parse an option's value, an integer of 1 or more."""
    if not text.lstrip("+-").isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"must be a whole number of 1 or more, got {text}")
    return int(text)
