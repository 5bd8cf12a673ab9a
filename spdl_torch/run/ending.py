"""What standard error has when a process of the program ends: reports, and the edits to make."""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import suppress
from datetime import timedelta
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from ..locks import in_forked_child
from ..observe.page.page import html_of, write_page
from ..observe.verdict.causes import SHORT_SECONDS
from ..observe.verdict.report import heads_of, part_of
from ..observe.verdict.verdict import how_input_bound
from ..shown_text import percent, printable, shown_seconds, wrapped
from .program import while_it_runs

_RANKS_SECONDS = 10  # how long the rank that prints waits for each other one to end
_NAMED = re.compile(
    r"^ *from torch\.utils\.data(\.\w+)? import (\([\w\s,]*|[\w ,]*)\bDataLoader\b", re.M
)
_ranks: list[Any] = []
"""The store that the ranks share, this rank, and their number, once this one loads in a group."""
in_forked_child(_ranks.clear)  # whose connection to the store is its parent's


def end_process(options: Any, known: dict[Any, Any]) -> None:
    """Show what is known of this process's loaders, once; of ranks, on the first that loads."""
    while_it_runs.close()
    sites = list(known.values())
    for made in sites:
        made.due()
    known.clear()
    if not sites:
        return
    if options.folder is not None:
        _leave_figures(sites, options.folder)
        return
    long = [made for made in sites if made.time[0] >= SHORT_SECONDS]
    told = list(map(_told, long))
    if short := dict.fromkeys(made.site.where for made in sites if made not in long):
        told.append(f"\nspdl-torch run: less than 2 s of loading, no report: {', '.join(short)}")
    path = options.html
    parts = [part_of(it.report, it.site.where, it.how) for it in long if path and it.report]
    shown = _of_slowest(max(made.time[1] for made in sites), ["\n".join(told), parts])
    if shown is None:
        return
    print(printable(shown[0]), file=sys.stderr, flush=True)
    if path is not None:
        if parent_process() and not _ranks:  # beside the program's own page
            path = path.with_stem(f"{path.stem}.{os.getpid()}")
        try:
            text = str(write_page(path, html_of("Report on loading", shown[1])))
        except (OSError, ValueError) as error:
            text = f"spdl-torch run: --html: {error}"
        print(printable(text), file=sys.stderr)


def _leave_figures(sites: list[Any], folder: Path) -> None:
    """Write the figures of this process's loops, at its end."""
    figures = {}
    for made in sites:
        seconds = made.waited + made.stepped
        if made.num_batches > 1 and seconds > 0:
            name = f"{made.site.where}, {made.site.loads}"
            figures[f"{name}: batches/s"] = made.num_batches / seconds
            figures[f"{name}: s to first batch"] = made.first
    (folder / f"{os.getpid()}.json").write_text(json.dumps(figures))


def _told(made: Any) -> str:
    head = f"\nspdl-torch run: {made.site.where}: {made.site.loads}, {made.how}"
    if made.report is not None:
        return f"{head}\n{made.report}\nEDIT     {_edit(made.site)}"
    seconds, waits = made.time
    whole, next_, loop = (
        1e3 * each / max(1, made.num_batches) for each in (seconds, made.waited, made.stepped)
    )
    gain = 1 / max(1e-9, 1 - waits)
    said = heads_of(
        f"{how_input_bound(waits)}: a step of {whole:.3g} ms waits {next_:.3g} ms in next() and "
        f"takes {loop:.3g} ms in the loop. The first batch took "
        f"{shown_seconds(made.first)}; {made.num_batches:,} took {shown_seconds(seconds)}.",
        "A loader that costs nothing would make the loop at most "
        f"{gain:,.{0 if gain >= 10 else 2}f}x as fast. torch's workers are not seen: where ours "
        "takes the dataset, without --loader, the report says which part of loading takes time.",
    )
    return "\n".join([head, *(wrapped(text, f"{word:<9}") for word, text in said)])


def _edit(site: Any) -> str:
    """Return the edit that makes our loader permanent."""
    if site.library:
        edit = "import torch.utils.data, spdl_torch; torch.utils.data.DataLoader = "
        return f"at the program's top, before {site.library}: {edit}spdl_torch.DataLoader"
    with suppress(OSError, ValueError):
        source = Path(site.file).read_text(encoding="utf-8")
        if named := _NAMED.search(source):
            where = f"{site.file}:{source.count(chr(10), 0, named.end()) + 1}"
            return f"{where}: leave DataLoader out; add: from spdl_torch import DataLoader"
        if "spdl_torch" in source:
            return "none: the program names our loader already"
    return f"{site.file}:{site.line or 1}: import spdl_torch; spdl_torch.DataLoader for torch's"


def note_ranks() -> None:
    """Keep the ranks' store: the program may leave its process group before it ends."""
    distributed: Any = sys.modules.get("torch.distributed")
    if not _ranks and distributed and distributed.is_available() and distributed.is_initialized():
        store = distributed.distributed_c10d._get_default_store()
        _ranks[:] = store, distributed.get_rank(), distributed.get_world_size()
        with suppress(RuntimeError):
            store.set(f"spdl_torch/run/{_ranks[1]}/loads", "")


def _of_slowest(own: float, told: list[Any]) -> list[Any] | None:
    """Return, on the first rank that loads, the text and the page's parts of the one that waits
    most for its data; elsewhere None. ``own``: the share of the time that this one waits."""
    if not _ranks:
        return None if int(os.environ.get("RANK", "0")) else told
    store, rank, num_ranks = _ranks
    waits, found = {rank: own}, {rank: told}
    is_first, others = rank == 0, list(range(rank + 1, num_ranks))
    with suppress(RuntimeError):  # the store, or a rank, is gone
        is_first = not any(store.check([f"spdl_torch/run/{each}/loads"]) for each in range(rank))
        store.set(f"spdl_torch/run/{rank}", json.dumps([own, told]))
        others = [it for it in others if is_first and store.check([f"spdl_torch/run/{it}/loads"])]
        for each in others:
            store.wait([f"spdl_torch/run/{each}"], timedelta(seconds=_RANKS_SECONDS))
            waits[each], found[each] = json.loads(store.get(f"spdl_torch/run/{each}"))
    if not is_first:
        return None
    text = ", ".join(f"rank {each} {percent(share)}" for each, share in waits.items())
    slowest = max(waits, key=waits.__getitem__)
    known = "" if len(waits) > len(others) else "others have not ended, and of these "
    text = f"Of the time, waiting for data takes {text}: {known}rank {slowest}, shown above, is the"
    text = "\n".join([found[slowest][0], "", wrapped(f"{text} slowest.", "RANKS    ")])
    return [text, found[slowest][1]]
