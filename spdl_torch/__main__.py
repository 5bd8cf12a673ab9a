"""The command line: ``python -m spdl_torch COMMAND``. Each command has its parser beside it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial

from . import __version__
from .command_options import CommandError
from .demo.command import add_demo, add_photographs
from .observe.commands import add_plot, add_report, add_trace
from .prepare.arguments import add_build_kernel, add_prepare
from .run.command import add_run
from .shown_text import printable

# In the order of the help. None of these modules imports torch.
_COMMANDS = (
    *(add_run, add_demo, add_photographs, add_prepare, add_build_kernel),
    *(add_report, add_plot, add_trace),
)


_WENT = {
    "check-gpu": "In a clone of the repository use python -m pytest -m cuda, and for rates "
    "python examples/bench; demo, too, checks that batches reach a GPU whole.",
    "watch": "Use report FILE, again and again: it reads the file of a run in progress, too.",
}
"""Commands that are gone, each with what to use instead."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv``; return its exit status.

    argv: None = this process's arguments; SIGTERM then ends the command as Ctrl-C does, with the
        results so far.
    """
    first = next(iter(sys.argv[1:] if argv is None else argv), "")
    if first == "run":  # what comes out of there, signals as well, is the program's
        return _run(_parser().parse_args(argv))
    if argv is None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if first in _WENT:
            print(f"spdl-torch: the command {first} is gone. {_WENT[first]}", file=sys.stderr)
            return 2
        parser = _parser()
        arguments = parser.parse_args(argv)
        if arguments.command is None:
            parser.print_help()
            return 0
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # nobody reads stdout any more, as after ``| head``
        with open(os.devnull, "w") as nowhere:  # or the interpreter complains when it flushes
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return 141  # what a shell shows for a program that SIGPIPE ends


def _run(arguments: argparse.Namespace) -> int:
    try:
        return int(arguments.run_command(arguments))
    except CommandError as error:
        # What it tells of may be somebody else's: names of files, what is in them.
        print(f"spdl-torch {arguments.command}: {printable(str(error))}", file=sys.stderr)
        return error.status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spdl-torch",
        description="Loading on threads for PyTorch training.",
        formatter_class=partial(argparse.HelpFormatter, max_help_position=20),
    )
    parser.add_argument("--version", action="version", version=f"spdl-torch {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for add_command in _COMMANDS:
        add_command(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
