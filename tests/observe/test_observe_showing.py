"""A report in a notebook's cell that is renewed while an epoch runs."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

import pytest
from _later import later
from _loader_helpers import PATIENCE_SECONDS, DataLoader

from spdl_torch.observe import showing

displaypub, interactiveshell = later("IPython.core.displaypub", "IPython.core.interactiveshell")


@pytest.fixture
def cell():
    """What a cell gets from IPython's shell: each output, and whether it replaces one."""
    outputs, renewed = [], threading.Event()

    class Publisher(displaypub.DisplayPublisher):
        def publish(self, data, metadata=None, *, transient=None, update=False, **_):
            outputs.append((data, (transient or {}).get("display_id"), update))
            if update:
                renewed.set()

    shell = interactiveshell.InteractiveShell.instance()
    shell.display_pub = Publisher()
    yield outputs, renewed
    interactiveshell.InteractiveShell.clear_instance()


class Reporting:
    """Numbers its reports; from the ``fails_at``-th on there is none."""

    def __init__(self, fails_at=None):
        self.number, self.fails_at = 0, fails_at

    def report(self):
        self.number += 1
        if self.number == self.fails_at:
            raise ZeroDivisionError
        return Shown(self.number)


class Shown:
    """Something that a notebook shows."""

    def __init__(self, number):
        self.number = number

    def _repr_html_(self):
        return f"<b>{self.number}</b>"


def test_report_is_renewed_in_its_place_while_the_block_runs(cell):
    """By the same display's id, and a last time when the block has ended."""
    outputs, renewed = cell
    with showing(Reporting(), interval_seconds=1e-3):
        assert renewed.wait(PATIENCE_SECONDS)
    first, *others = outputs
    assert (first[0]["text/html"], first[2]) == ("<b>1</b>", False)
    assert [data["text/html"] for data, *_ in others] == [
        f"<b>{number}</b>" for number in range(2, len(outputs) + 1)
    ]
    assert {(name, update) for _, name, update in others} == {(first[1], True)}
    assert first[1]


def test_report_of_a_loader_stays_when_the_loop_fails(cell):
    """The last one, of the batches that there were."""
    outputs, _ = cell
    loader = DataLoader(list(range(12)), 2, num_workers=2)

    def loop():
        with showing(loader, interval_seconds=100):
            for number, _ in enumerate(loader):
                if number == 3:
                    raise KeyError("the loop's own")

    with pytest.raises(KeyError, match="the loop's own"):
        loop()
    assert len(outputs) == 2
    assert "nothing was loaded yet" in outputs[0][0]["text/plain"]
    assert "spdl" in outputs[-1][0]["text/html"]
    assert outputs[-1][0]["text/plain"].startswith("VERDICT")


def test_report_that_fails_is_logged_and_does_not_end_the_loop(cell, caplog):
    """The one in the cell stays until the block ends."""
    reporting, seen = Reporting(fails_at=2), threading.Event()

    class Heard(logging.Handler):
        def emit(self, record):
            seen.set()

    logger, heard = logging.getLogger("spdl_torch.observe"), Heard()
    logger.addHandler(heard)
    with caplog.at_level(logging.ERROR), showing(reporting, interval_seconds=1e-3):
        assert seen.wait(PATIENCE_SECONDS)
    logger.removeHandler(heard)
    assert "could not be renewed" in caplog.text
    assert reporting.number == 3


def test_interval_is_above_zero():
    """Else it would make reports without a pause."""
    with (
        pytest.raises(ValueError, match="interval_seconds must be > 0, got 0"),
        showing(None, interval_seconds=0),
    ):
        pass


def test_error_names_the_terminal_form_where_there_is_no_ipython():
    """In a process that finds none."""
    program = """
import sys
sys.modules["IPython"] = sys.modules["IPython.display"] = None
from spdl_torch.observe import showing
try:
    with showing(None): pass
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "python -m spdl_torch watch" in done.stdout
