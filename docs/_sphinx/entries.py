"""Gives every public name an entry, made from its docstring, on the page that explains it.

Pages stay as they are for whoever reads them in the repository. In the site each page of
docs/reference/ ends with the entries of the names that it speaks of, and a name that is set as code
anywhere leads to its entry. A public name that no page speaks of fails the build.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
import sys
from collections import Counter
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from docutils import nodes
from sphinx.errors import ExtensionError
from sphinx.util.nodes import make_refnode
from sphinx.util.typing import stringify_annotation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, ModuleType

    from sphinx.application import Sphinx

PAGES = {
    "spdl_torch": ("dataloader", "pipeline", "packing_and_sampling", "io"),
    "spdl_torch.accelerate": ("trainers",),
    "spdl_torch.ray": ("trainers",),
    "spdl_torch.transformers": ("trainers",),
    "spdl_torch.autotune": ("autotune",),
    "spdl_torch.data": ("mixing", "packing_and_sampling", "sources", "pipeline"),
    "spdl_torch.data.sources": ("sources",),
    "spdl_torch.io": ("io", "video", "dataloader", "sources"),
    "spdl_torch.nn": ("dataloader",),
    "spdl_torch.lightning": ("trainers",),
    "spdl_torch.observe": ("statistics", "reports", "traces"),
    "spdl_torch.pipeline": ("pipeline", "statistics"),
    "spdl_torch.data.subprocesses.pipelines": ("pipeline",),
    "spdl_torch.testing": ("testing",),
    "spdl_torch.spdl.dataloader": ("spdl",),
    "spdl_torch.spdl.examples.sqlite_stats_logger": ("statistics",),
    "spdl_torch.spdl.io": ("spdl", "io", "video"),
    "spdl_torch.spdl.io.utils": ("spdl",),
    "spdl_torch.spdl.pipeline": ("pipeline", "statistics"),
    "spdl_torch.spdl.pipeline.defs": ("spdl",),
    "spdl_torch.spdl.source": ("spdl",),
    "spdl_torch.spdl.source.utils": ("spdl",),
    "spdl_torch.spdl.source.imagenet": ("spdl",),
    "spdl_torch.spdl.source.local_directory": ("spdl",),
}
"""The pages that speak of each public module; an entry stands on the one that does so most."""


class Entry(NamedTuple):
    """A public name and where its entry stands."""

    module: str
    name: str
    page: str

    @property
    def path(self) -> str:
        """``spdl_torch.observe.Profile``."""
        return f"{self.module}.{self.name}"


@cache
def entries(reference: Path) -> tuple[Entry, ...]:
    """Every public name, once: a name that several modules hand on is the first one's."""
    found: list[Entry] = []
    seen: set[tuple[str, int]] = set()
    for module, pages in PAGES.items():
        public = importlib.import_module(module)
        for name in public.__all__:
            identity = name, id(getattr(public, name))
            if identity in seen or name.startswith("__"):
                continue
            seen.add(identity)
            found.append(Entry(module, name, _page_of(name, module, pages, reference)))
    return tuple(found)


def _page_of(name: str, module: str, pages: tuple[str, ...], reference: Path) -> str:
    """The page whose heading names it, or else the one that speaks of it most."""
    value = getattr(importlib.import_module(module), name)
    if "dataloader" in pages and inspect.isclass(value) and issubclass(value, BaseException):
        return "dataloader"
    headings = {p: (reference / f"{p}.md").read_text("utf-8").splitlines()[0] for p in pages}
    mentions = {p: words_of(reference / f"{p}.md")[name] for p in pages}
    page = max(pages, key=lambda p: (name in re.findall(r"\w+", headings[p]), mentions[p]))
    if not mentions[page]:
        raise ExtensionError(f"{module}.{name} is public, and none of {pages} speaks of it")
    return page


@cache
def words_of(page: Path) -> Counter[str]:
    """How often a page sets a name as code."""
    text = page.read_text(encoding="utf-8")
    code = re.findall(r"^```.*?^```|`[^`\n]+`", text, flags=re.S | re.M)
    return Counter(re.findall(r"[A-Za-z_]\w*", " ".join(code)))


def add_entries(app: Sphinx, docname: str, content: list[str]) -> None:
    """Sphinx's event ``source-read``: the page's entries after its text."""
    folder, _, page = docname.rpartition("/")
    if folder != "reference":
        return
    reference = Path(app.srcdir) / "reference"
    here = [entry for entry in entries(reference) if entry.page == page]
    if here:
        words = words_of(reference / f"{page}.md")
        directives = "\n".join(line for entry in here for line in _directive(entry, words))
        content[0] += f"\n## In detail\n\n```{{eval-rst}}\n{directives}\n```\n"


def _directive(entry: Entry, words: Counter[str]) -> Iterator[str]:
    value = getattr(importlib.import_module(entry.module), entry.name)
    if inspect.isroutine(value):
        yield from (f".. autofunction:: {entry.path}", "")
    elif not inspect.isclass(value) or value.__name__ != entry.name:  # a name for a type
        yield from (f".. py:type:: {entry.path}", f"   :canonical: {_text_of(value)}", "")
    else:
        is_error = issubclass(value, BaseException)
        yield f".. {'autoexception' if is_error else 'autoclass'}:: {entry.path}"
        yield "   :members:"
        if issubclass(value, enum.Enum | tuple) or is_dataclass(value):
            yield "   :undoc-members:"
        if is_error:
            yield "   :show-inheritance:"
        yield f"   :inherited-members: {', '.join(sorted(_foreign_bases(value)))}"
        yield f"   :exclude-members: {', '.join(sorted(_unmentioned(value, words)))}"
        yield ""


def _text_of(annotation: Any) -> str:
    return str(stringify_annotation(annotation, "smart"))


def _foreign_bases(cls: type) -> set[str]:
    """Base classes that are others', or have an entry of their own; so have their members."""
    return {base.__name__ for base in cls.__mro__ if not _is_ours(base.__module__)} | {
        base.__name__ for base in cls.__mro__[1:] if base.__name__ in _public_names()
    }


def _unmentioned(cls: type, words: Counter[str]) -> set[str]:
    """Members that the page does not speak of: those of private base classes, which are for us
    alone, and those that answer another package's call, as a callback's do."""
    inherited = {True: set[str](), False: set[str]()}
    for base in cls.__mro__[1:]:
        inherited[_is_ours(base.__module__)] |= vars(base).keys()
    names = (inherited[True] - vars(cls).keys()) | (inherited[False] & vars(cls).keys())
    return {"__init__"} | {name for name in names if not name.startswith("_") and not words[name]}


@cache
def _public_names() -> frozenset[str]:
    return frozenset(name for m in PAGES for name in importlib.import_module(m).__all__)


def sign(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str, returns: str
) -> tuple[str | None, str | None] | None:
    """Sphinx's event ``autodoc-process-signature``: what is not code becomes ``...``."""
    if inspect.isclass(obj) and (issubclass(obj, enum.Enum) or getattr(obj, "_is_protocol", 0)):
        return "", None  # nobody makes one
    return signature and re.sub(r"<[^<>]+>", "...", signature), returns


def import_types() -> None:
    """Run the imports that modules keep for type checkers, so that annotations can be evaluated.

    All modules are imported by then, so none of them imports one that is half made. An import may
    want what another one brings, so those that fail are tried again while others succeed.
    """
    waiting = [
        (module, compile(ast.Module([statement], []), str(module.__file__), "exec"))
        for name, module in sorted(sys.modules.items())
        if _is_ours(name)
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
    ]
    num_before = 0
    while len(waiting) != num_before:
        num_before = len(waiting)
        waiting = [(module, code) for module, code in waiting if not _runs(module, code)]


def _runs(module: ModuleType, code: CodeType) -> bool:
    try:
        exec(code, vars(module))
    except ImportError:  # of a package that is not installed, it remains a name in the signature
        return False
    return True


def _is_ours(name: str) -> bool:
    return name.split(".")[0] == "spdl_torch"


def import_everything(app: Sphinx) -> None:
    """Sphinx's event ``builder-inited``."""
    for entry in entries(Path(app.srcdir) / "reference"):
        importlib.import_module(entry.module)
    import_types()


def resolve_missing(app: Sphinx, env: Any, node: nodes.Element, shown: nodes.Node) -> Any:
    """Sphinx's event ``missing-reference``: a type in a signature that has no entry stays a word.

    It is another package's, or one of ours that is not public. References that somebody wrote have
    to lead somewhere, unless they name another package.
    """
    is_written = "refexplicit" in node
    if node.get("refdomain") == "py" and not (is_written and _is_ours(node["reftarget"])):
        return shown
    return None


def link_names(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Sphinx's event ``doctree-resolved``: a public name set as code leads to its entry."""
    targets = _targets(app)
    for literal in list(doctree.findall(nodes.literal)):
        found = re.match(r"([A-Za-z_][\w.]*)(?=\(|$)", literal.astext())
        candidates = targets.get(found[1], []) if found else []
        if not candidates or is_in_a_link(literal) or _is_others(literal, docname):
            continue
        here = [target for target in candidates if target.page == docname]
        page, anchor, path = [*here, *candidates][0]
        code = literal.deepcopy()
        literal.replace_self(make_refnode(app.builder, docname, page, anchor, code, path))


class Target(NamedTuple):
    """Where an entry is found, and the full name, which the link shows as its title."""

    page: str
    anchor: str
    path: str


def _targets(app: Sphinx) -> dict[str, list[Target]]:
    """The entries by the names that people write: ``Profile``, ``spdl_torch.observe.Profile.load``.

    A bare name may be that of several, in the order of ``PAGES``.
    """
    objects = app.env.domains["py"].objects  # type: ignore[attr-defined]  # of that domain
    found: dict[str, list[Target]] = {}
    for entry in entries(Path(app.srcdir) / "reference"):
        for path, there in objects.items():
            if path == entry.path or path.startswith(f"{entry.path}."):
                target = Target(there.docname, there.node_id, path)
                for name in {path, path.removeprefix(f"{entry.module}.")}:
                    found.setdefault(name, []).append(target)
    return found


def is_in_a_link(literal: nodes.literal) -> bool:
    """Whether it has a target already, or is a heading."""
    parent = literal.parent
    while parent is not None and not isinstance(parent, nodes.reference | nodes.title):
        parent = parent.parent
    return parent is not None


def _is_others(literal: nodes.literal, docname: str) -> bool:
    """Whether a name is another package's: after "torch's" and the like it is.

    A ``Trainer`` is Lightning's, but for the page of Hugging Face's.
    """
    if literal.astext().startswith("Trainer") and not docname.endswith("trainers"):
        return True
    siblings = literal.parent.children
    before = "".join(sibling.astext() for sibling in siblings[: siblings.index(literal)])
    return bool(re.search(r"(?:\w['\u2019]s|Lightning|spdl|torch|torchdata) $", before))
