"""The lines that a check prints as it goes: ``NAME value limit PASS|FAIL|SKIP``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TextIO

from ..locks import RLock
from ..whole_files import write_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_TRAINED = ("ours", "synthetic", "torch")
_COPIES, _BARE = "copy_38.5MB_slots_over_bare", "copy_38.5MB_bare_gigabytes_per_second"
_HAND_OVER = "hand_over_threads_microseconds"

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
        self._lock = RLock()
        self.lines: list[Line] = []
        self._finished: dict[str, int] = {}
        """The groups of checks that are whole, with the number of lines at their end."""

    def take_up(self) -> None:
        """Begin with the lines of the groups that the file has whole.

        Raises: ValueError: it is no such file, or of another machine or version; OSError: it cannot
            be read.
        """
        assert self._path is not None, "guaranteed by the command's options"
        found = json.loads(self._path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or not {"lines", "finished"} <= found.keys():
            raise ValueError(f"{self._path} is no file of check-gpu --json")
        for name, fact in self._facts.items():
            if found.get(name) != fact:
                raise ValueError(
                    f"{self._path} is of {name} {found.get(name)!r}, and this is {fact!r}: begin "
                    "anew, without --resume"
                )
        self._finished = dict(found["finished"])
        count = max(self._finished.values(), default=0)
        self.lines = [Line(**each) for each in found["lines"][:count]]

    def finish(self, group: str) -> None:
        """Note that a group of checks is whole."""
        with self._lock:
            self._finished[group] = len(self.lines)
            self._write()

    def has_finished(self, group: str) -> bool:
        """Return whether a group of checks is whole."""
        return group in self._finished

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

    def three_figures(self) -> list[str]:
        """Return what to tell others, as far as it was measured: training, copies, hand-over."""
        found = {line.name: line.value for line in self.lines if isinstance(line.value, float)}
        said = list[str]()
        if {f"train_{name}_images_per_second" for name in _TRAINED} <= found.keys():
            ours, idle, torch = (found[f"train_{name}_images_per_second"] for name in _TRAINED)
            said.append(
                f"training: {ours:.0f} images/s beside the loader, {ours / idle:.2f} of the speed "
                f"without loading; {torch:.0f} with torch's DataLoader"
            )
        if {_COPIES, _BARE} <= found.keys():
            said.append(
                f"copies: {found[_COPIES] * found[_BARE]:.1f} GB/s, {found[_COPIES]:.2f} of bare "
                "copies from pinned memory"
            )
        if _HAND_OVER in found:
            said.append(f"hand-over: {found[_HAND_OVER]:.0f} us of the training thread for a batch")
        return said

    @property
    def has_passed(self) -> bool:
        """Whether no line is a FAIL, and at least one a PASS."""
        outcomes = {line.outcome for line in self.lines}
        return "PASS" in outcomes and "FAIL" not in outcomes

    def _add(self, line: Line) -> None:
        with self._lock:
            self.lines.append(line)
            print(line, file=self._out, flush=True)
            self._write()

    def _write(self) -> None:
        if self._path is not None:
            written = {
                **self._facts,
                "passed": self.has_passed,
                "finished": self._finished,
                "lines": [asdict(each) for each in self.lines],
            }
            write_text(self._path, json.dumps(written, indent=1) + "\n")
