"""The lines that a check prints as it goes: ``NAME value limit PASS|FAIL|SKIP``."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TextIO

from ..whole_files import write_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Outcome = Literal["PASS", "FAIL", "SKIP"]


@dataclass(frozen=True, slots=True)
class Line:
    """One finding."""

    name: str
    value: float | str
    limit: str
    """The goal, such as ``>= 0.95``; ``-`` = none, the value is for information."""
    outcome: Outcome

    def __str__(self) -> str:
        value = self.value if isinstance(self.value, str) else f"{self.value:.4g}"
        return f"{self.name} {value} {self.limit} {self.outcome}"


class Sheet:
    """Prints each line at once, and keeps all in a JSON file: a run that is killed leaves what it
    had found. Any thread may add lines.

    facts: about the machine, for the file. path: of the file; None = no file is written.
    """

    def __init__(self, out: TextIO, facts: Mapping[str, Any], path: Path | None = None) -> None:
        self._out = out
        self._facts = dict(facts)
        self._path = path
        self._lock = threading.Lock()
        self._lines: list[Line] = []

    def at_most(self, name: str, value: float, limit: float) -> None:
        """Add a value that is to be no more than ``limit``."""
        self._add(Line(name, value, f"<= {limit:g}", "PASS" if value <= limit else "FAIL"))

    def at_least(self, name: str, value: float, limit: float) -> None:
        """Add a value that is to be no less than ``limit``."""
        self._add(Line(name, value, f">= {limit:g}", "PASS" if value >= limit else "FAIL"))

    def note(self, name: str, value: float) -> None:
        """Add a value without a goal."""
        self._add(Line(name, value, "-", "PASS"))

    def skip(self, name: str, why: str) -> None:
        """Add a check that cannot be made here."""
        self._add(Line(name, f"({why})", "-", "SKIP"))

    def fail(self, name: str, why: str) -> None:
        """Add a check that broke."""
        self._add(Line(name, f"({why})", "-", "FAIL"))

    @property
    def has_passed(self) -> bool:
        """Whether no line is a FAIL, and at least one a PASS."""
        outcomes = {line.outcome for line in self._lines}
        return "PASS" in outcomes and "FAIL" not in outcomes

    def _add(self, line: Line) -> None:
        with self._lock:
            self._lines.append(line)
            print(line, file=self._out, flush=True)
            if self._path is not None:
                lines = [asdict(each) for each in self._lines]
                written = {**self._facts, "passed": self.has_passed, "lines": lines}
                write_text(self._path, json.dumps(written, indent=1) + "\n")
