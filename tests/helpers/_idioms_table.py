"""Makes docs/reference/idioms.md: ``python tests/helpers/_idioms_table.py [RUNS]``, some minutes.

Each idiom is loaded with ``isolation="thread"``, by threads that disturb each other, until it goes
wrong, RUNS times at most. That torch's workers and ours are right by default is what
``test_idioms.py`` shows in every run.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from pathlib import Path

import _idioms_compositions  # noqa: F401  # these register their idioms
import _idioms_files  # noqa: F401
import _idioms_objects  # noqa: F401
import _idioms_process  # noqa: F401
from _folders import ROOT
from _idioms import IDIOMS
from _idioms_runs import load, own_process
from _inside import placement_of

import spdl_torch
from spdl_torch.testing._interleaving import threads_interleaved

PAGE = ROOT / "docs" / "reference" / "idioms.md"
SECTIONS = {
    "_idioms_files": "Files and other handles",
    "_idioms_objects": "Objects in which samples leave something",
    "_idioms_process": "What belongs to the process",
    "_idioms_compositions": "Datasets and functions inside of others",
}
"""The modules of the idioms, and their headings."""
RIGHT, WRONG, ENDS, HANGS = "right", "wrong", "ends the program", "hangs"
_HEAD = '| idiom | what it does | torch\'s workers | ours | ours, `isolation="thread"` |'
_LONGEST_SECONDS = 60


def names_of(module):
    """The idioms of a module, in the order in which it has them."""
    return [name for name, make in IDIOMS.items() if make.__module__ == module]


def what(name):
    """The first paragraph of an idiom's docstring, as Markdown."""
    paragraph = IDIOMS[name].__doc__.strip().split("\n\n")[0]
    return " ".join(paragraph.split()).replace("``", "`").replace("|", "\\|")


def rows_of_page():
    """The cells after the name, for each idiom of the page."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    return {first.strip("`"): rest for first, *rest in rows}


def ours_by_default(name, folder):
    """The cell of our loader: right, and where its workers live."""
    folder.mkdir(parents=True)
    with own_process():
        idiom = IDIOMS[name](folder)
        options = {"batch_size": 8, "num_workers": 2, "multiprocessing_context": "fork"}
        loader = spdl_torch.DataLoader(idiom.dataset, **{**options, **idiom.options})
        where = "in processes" if placement_of(loader).num_processes else "on threads"
        return f"{RIGHT}, {where}"


def on_threads(name):
    """What becomes of a run with ``isolation="thread"``, which gets a process of its own."""
    fork = multiprocessing.get_context("fork")
    found = fork.SimpleQueue()
    child = fork.Process(target=_load_on_threads, args=(name, found))
    child.start()
    child.join(_LONGEST_SECONDS)
    if child.is_alive():
        child.kill()
        child.join()
        return HANGS
    if child.exitcode < 0:
        return ENDS
    return WRONG if child.exitcode else found.get()


def _load_on_threads(name, found):
    with tempfile.TemporaryDirectory() as folder, threads_interleaved():
        try:
            where = Path(folder) / "x"
            _, faults = load(spdl_torch.DataLoader, name, where, isolation="thread")
        except Exception as error:
            faults = [error]
    found.put(WRONG if faults else RIGHT)


def main(num_runs=3):
    """Load each idiom, and write the page."""
    text, num_wrong = "", 0
    for module, heading in SECTIONS.items():
        text += f"\n## {heading}\n\n{_HEAD}\n|---|---|---|---|---|\n"
        for name in names_of(module):
            with tempfile.TemporaryDirectory() as folder:
                ours = ours_by_default(name, Path(folder) / "x")
            runs = (on_threads(name) for _ in range(num_runs))
            threads = next((outcome for outcome in runs if outcome != RIGHT), RIGHT)
            num_wrong += threads != RIGHT and module != "_idioms_compositions"
            cells = (f"`{name}`", what(name), RIGHT, ours, threads)
            print(*cells, sep=" | ", file=sys.stderr, flush=True)
            text += f"| {' | '.join(cells)} |\n"
    introduction = PAGE.read_text(encoding="utf-8").partition("\n## ")[0]
    PAGE.write_text(introduction.rstrip() + "\n" + text, encoding="utf-8")
    print(f"{num_wrong} wrong on threads, without the compositions")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
