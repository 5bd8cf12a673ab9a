"""Turns the sections of our docstrings into fields, which Sphinx lays out as lists.

A docstring is plain prose for the reader of an editor. Its sections begin at the left edge:

    Args:
        width, height: pixels of the output.
    Returns: uint8, shape (N, 3, H, W).
    Raises: DecodeError: not an image; OSError: a path cannot be read.

and go on in indented lines. Everything else stays as it is. (Sphinx's napoleon knows only sections
whose title has a line of its own: a fifth of the package's 417.)
"""

from __future__ import annotations

import builtins
import inspect
import re
import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sphinx.application import Sphinx

TITLES = {
    "Args": "Parameters",
    "Extra arguments, keyword-only": "Extra parameters, keyword-only",
    "Returns": "Returns",
    "Raises": "Raises",
    "Raises (on access)": "Raises on access",
    "Warns": "Warns",
}

_SECTION = re.compile(rf"({'|'.join(map(re.escape, TITLES))}):(?: (.*))?$")
_INLINE = re.compile(r"(?<=[.:`)]) (?=(?:Raises|Returns|Warns): )")
_LEAD = re.compile(r"^([A-Z][a-z]+): (?=\S)")  # "Stopping: ..." at the beginning of a paragraph
_NAMES = re.compile(r"(\w+(?:, \w+)*)(?:: |,$)")
_ARGUMENT = re.compile(r"([*\w]+(?:,\s+[*\w]+)*): (.*)", re.S)
_ERRORS = re.compile(r"((?:[\w.]+)(?:, [\w.]+)*)(?=[:;,.]| \(|$)")


class Section(NamedTuple):
    """``Raises: ValueError: ...`` as its name and its text without the indentation."""

    name: str
    text: str


def fields_of(lines: Iterable[str], parameters: Iterable[str] = ()) -> list[str]:
    """Return a docstring's lines in reStructuredText, with fields in place of its sections.

    ``parameters``: names that may begin a line of a docstring without ``Args``.
    """
    out: list[str] = []
    for part in _parts(_split_inline(lines), frozenset(parameters)):
        if isinstance(part, str):
            if part and out and _is_in_field(out[-1]):
                out.append("")
            begins = not out or not out[-1].strip()
            out.append(_LEAD.sub(r"**\1:** ", part, count=1) if begins else part)
            continue
        if out and out[-1].strip() and not _is_in_field(out[-1]):
            out.append("")
        out += _field(part)
    return [*out, ""]


def _is_in_field(line: str) -> bool:
    """Whether a line belongs to a field, after which the next one follows at once."""
    return line.startswith((":", "   "))


def _split_inline(lines: Iterable[str]) -> Iterator[str]:
    """Make a section of ``... of a pass. Raises: as snapshot().``, to the end of the paragraph."""
    is_after_split = False
    for line in lines:
        before, *sections = _INLINE.split(line)
        is_after_split = is_after_split and bool(line) and not _SECTION.match(line)
        yield f"    {before}" if is_after_split else before
        yield from sections
        is_after_split = is_after_split or bool(sections)


def _parts(lines: Iterable[str], parameters: frozenset[str]) -> Iterator[str | Section]:
    """Lines of prose, and sections.

    A line at the left edge that begins with a parameter's name begins a section of arguments, too.
    """
    name, body, is_bare = "", list[str](), False
    for line in lines:
        found, names = _SECTION.match(line), _NAMES.match(line)
        is_argument = names is not None and parameters.issuperset(names[1].split(", "))
        if name and (line[:1] in ("", " ") or (is_bare and is_argument)):
            body.append(line)  # an empty line ends it if no indented one follows
            continue
        if name:
            yield _section(name, body)
            name = ""
        if found:
            name, body, is_bare = found[1], [found[2] or ""], False
        elif is_argument:
            name, body, is_bare = "Args", ["", line], True
        else:
            yield line
    if name:
        yield _section(name, body)


def _section(name: str, body: list[str]) -> Section:
    """Without the empty lines at its end."""
    return Section(name, "\n".join([body[0], textwrap.dedent("\n".join(body[1:]))]).strip())


def _field(section: Section) -> list[str]:
    """The field's lines: a list of arguments or errors, or one paragraph."""
    title = f":{TITLES[section.name]}:"
    if section.name in ("Args", "Extra arguments, keyword-only"):
        items = [_argument(entry) for entry in _entries(section.text)]
    elif section.name in ("Raises", "Raises (on access)", "Warns"):
        entries = _entries(section.text)
        items = [_error(error) for entry in entries for error in _split_errors(entry)]
    else:
        return [title, *textwrap.indent(section.text, "   ").splitlines()]
    if len(items) == 1 and section.name != "Args":
        return [title, *textwrap.indent(items[0], "   ").splitlines()]
    lines = [title]
    for item in items:
        first, *rest = item.splitlines()
        lines += [f"   - {first}", *(f"     {line}".rstrip() for line in rest)]
    return lines


def _entries(text: str) -> list[str]:
    """Entries that begin at the left edge, with the indented lines that follow each.

    A text that begins on the section's own line is one entry.
    """
    entries: list[str] = []
    for line in text.splitlines():
        if line[:1] in ("", " ") and entries:
            entries[-1] += "\n" + line.strip()
        elif entries and not (_ARGUMENT.match(line) and _is_entry_after(entries[-1])):
            entries[-1] += "\n" + line
        else:
            entries.append(line)
    return [entry.strip() for entry in entries]


def _is_entry_after(entry: str) -> bool:
    """Whether another entry may follow: this one has ended."""
    return entry.rstrip().endswith((".", ":", ")", "`"))


def _argument(entry: str) -> str:
    found = _ARGUMENT.match(entry)
    if found is None:
        return entry
    names = ", ".join(f"``{name}``" for name in re.split(r",\s+", found[1]))
    return f"{names}: {found[2]}"


def _split_errors(entry: str) -> list[str]:
    """``TypeError: this; ValueError: that`` as two entries."""
    starts = [0]
    for found in re.finditer(r";\s+", entry):
        errors = _ERRORS.match(entry, found.end())
        if errors and all(map(is_exception, errors[1].split(", "))):
            starts.append(found.end())
    ends = [*starts[1:], len(entry)]
    return [entry[start:end].strip().rstrip(";") for start, end in zip(starts, ends, strict=True)]


def _error(entry: str) -> str:
    """With the names of the errors as code, from where they are linked."""
    found = _ERRORS.match(entry)
    if found is None or not all(map(is_exception, found[1].split(", "))):
        return entry
    names = ", ".join(f"``{name}``" for name in found[1].split(", "))
    return names + entry[found.end() :]


def is_exception(name: str) -> bool:
    """Whether a word is the name of an exception: Python's, or one that is called so."""
    word = name.rpartition(".")[2]
    value = getattr(builtins, word, None)
    if isinstance(value, type) and issubclass(value, BaseException):
        return True
    return bool(re.fullmatch(r"[A-Z]\w*(Error|Exception|Failure|Stopped|Warning)", word))


def _tables(lines: list[str]) -> list[str]:
    """Tables between bars, as the editor shows them, as Sphinx's; other lines as they are."""
    out: list[str] = []
    is_in_table = False
    for line in lines:
        text = line.lstrip()
        indent = line[: len(line) - len(text)]
        if not text.startswith("|"):
            out += ["", line] if is_in_table else [line]
            is_in_table = False
            continue
        if not is_in_table:
            out += ["", f"{indent}.. list-table::", f"{indent}   :header-rows: 1", ""]
            is_in_table = True
        if not re.fullmatch(r"[|:\- ]+", text):  # the rule below the head
            first, *rest = (cell.strip() for cell in text.strip("|").split("|"))
            out += [f"{indent}   * - {first}", *(f"{indent}     - {cell}" for cell in rest)]
    return out


def process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Sphinx's event ``autodoc-process-docstring``: changes the lines in place."""
    try:
        parameters = tuple(inspect.signature(obj).parameters) if callable(obj) else ()
    except (TypeError, ValueError):  # of a built-in type
        parameters = ()
    is_of_named_tuple = lines[:1] and lines[0].startswith("Alias for field number")
    lines[:] = [] if is_of_named_tuple else fields_of(_tables(lines), parameters)
