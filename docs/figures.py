"""Writes the table of a stage's figures in the reference: ``python docs/figures.py``.

The page has it as text, for readers of the repository; a test compares it with the code's table.
"""

from __future__ import annotations

import re
from pathlib import Path

from spdl_torch.observe.verdict.figures import FIGURES

PAGE = Path(__file__).with_name("reference") / "statistics.md"
_HEADS = "| key | column | unit | meaning | given in |\n|---|---|---|---|---|\n"


def with_table(page: str) -> str:
    """Return the page with the table as the code has it."""
    before, after = re.split(re.escape(_HEADS) + r"(?:\|.*\n)*", page)
    rows = []
    for each in FIGURES:
        places = ", ".join([*each.on.split(), *(["pictures"] if each.panel else [])])
        column = f"`{each.heading}`" if each.heading else ""
        if each.on:  # else it has no key that anybody sees
            rows.append(f"| `{each.key}` | {column} | {each.unit} | {each.meaning} | {places} |\n")
    return f"{before}{_HEADS}{''.join(rows)}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
