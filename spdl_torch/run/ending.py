"""What standard error has when a process of the program ends: reports, and the edits to make."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..shown_text import percent, printable, shown_seconds, wrapped
from .program import while_it_runs

_RANKS_SECONDS = 10  # how long rank 0 waits for the others to end
_NAMED = re.compile(
    r"^ *from torch\.utils\.data(\.\w+)? import (\([\w\s,]*|[\w ,]*)\bDataLoader\b", re.M
)
_ranks: list[Any] = []
"""The store that the ranks share, once the program has one, this rank, and their number."""


def end_process(options: Any, known: dict[Any, Any]) -> None:
    """Show what is known of this process's loaders, once; of several ranks, on the first."""
    while_it_runs.close()
    sites = list(known.values())
    known.clear()
    for made in sites:
        made.keep(made.loader())
    if options.folder is not None:
        from .turns import leave_figures

        leave_figures(sites, options.folder)
    elif sites and (lines := _lines_of_ranks(sites)) is not None:
        said = _watched if options.loader == "torch" else _reported
        heads = [f"\nspdl-torch run: {m.site.where}: {m.site.loads}, {m.how}" for m in sites]
        told = [f"{head}\n{said(made)}" for head, made in zip(heads, sites, strict=True)]
        print(printable("\n".join([*told, *lines])), file=sys.stderr, flush=True)
        if options.html is not None:
            _write_page(sites, options.html)


def _reported(made: Any) -> str:
    if made.report is None or made.report.stats.elapsed < 2:
        return "It has loaded for less than 2 s with our loader: there is no report."
    return f"{made.report}\nEDIT     {_edit(made.site)}"


def _watched(made: Any) -> str:
    total, steps = max(1e-9, made.waited + made.stepped), max(1e-9, made.stepped)
    return wrapped(
        f"{made.num_batches:,} batches in {shown_seconds(total)}. The loop waited "
        f"{shown_seconds(made.waited)} for them ({percent(made.waited / total)}), "
        f"{shown_seconds(made.first)} for the first; a step between takes "
        f"{1e3 * steps / max(1, made.num_batches):.3g} ms. A loader that costs nothing would make "
        f"the loop at most {total / steps:.2f}x as fast. What torch's workers do is not seen: "
        "without --loader, the report says which part of loading takes the time."
    )


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


def _write_page(sites: list[Any], path: Path) -> None:
    from ..observe.page.page import html_of, write_page
    from ..observe.verdict.report import part_of

    parts = [part_of(each.report, each.site.where, each.how) for each in sites if each.report]
    try:
        print(write_page(path, html_of("Report on loading", parts)), file=sys.stderr)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        print(f"spdl-torch run: --html: {printable(str(error))}", file=sys.stderr)


def note_ranks() -> None:
    """Keep the ranks' store: the program may leave its process group before it ends."""
    distributed: Any = sys.modules.get("torch.distributed")
    if not _ranks and distributed and distributed.is_available() and distributed.is_initialized():
        store = distributed.distributed_c10d._get_default_store()
        _ranks[:] = store, distributed.get_rank(), distributed.get_world_size()


def _lines_of_ranks(sites: list[Any]) -> list[str] | None:
    """Return, on rank 0, what is said of several ranks; elsewhere None."""
    if not _ranks:
        return None if int(os.environ.get("RANK", "0")) else []
    store, rank, num_ranks = _ranks
    waits = {rank: max(map(_waiting, sites))}
    with suppress(RuntimeError):  # the store, or a rank, is gone
        store.set(f"spdl_torch/run/{rank}", str(waits[rank]))
        for other in range(1, 0 if rank else num_ranks):
            store.wait([f"spdl_torch/run/{other}"], timedelta(seconds=_RANKS_SECONDS))
            waits[other] = float(store.get(f"spdl_torch/run/{other}"))
    if rank or num_ranks == 1:
        return None if rank else []
    text = ", ".join(f"rank {each} {percent(share)}" for each, share in waits.items())
    from ..observe.verdict.ranks import slowest_of

    is_known = len(waits) == num_ranks
    known = f"rank {slowest_of(waits)} is the slowest" if is_known else "others have not ended"
    return [wrapped(f"Of the time, waiting for data takes {text}: {known}.", "\nRANKS    ")]


def _waiting(made: Any) -> float:
    if made.report is not None:
        return float(made.report.stats.consumer_wait_ratio)
    return float(made.waited / max(1e-9, made.waited + made.stepped))
