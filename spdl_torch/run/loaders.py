"""The classes that a program gets as ``torch.utils.data.DataLoader``."""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import sys
import sysconfig
import weakref
from contextlib import suppress
from multiprocessing import current_process, util
from time import perf_counter
from traceback import walk_stack
from typing import Any, NamedTuple, TypeVar

from torch.utils.data import DataLoader as TorchDataLoader

# What makes reports comes now: Ctrl-C during an import when a loader goes would be lost.
import spdl_torch.loader.stats.stats

from ..engine.threads import before_exit
from ..loader.dataloader import DataLoader as OurDataLoader
from ..locks import in_forked_child
from ..shown_text import printable_line
from .ending import end_process, note_ranks
from .program import while_it_runs

_OURS = (os.path.dirname(os.path.dirname(__file__)), "<frozen ")
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib", "stdlib")})

T_co = TypeVar("T_co", covariant=True)
_options: Any = None


def exchange_loader(options: Any) -> None:
    """Give torch's name to one of the classes below, wherever it stands by now; at the end of this
    process and of its children, say what is known of them."""
    global _options
    _options = options
    if options.html is not None:
        # Now: its import has Python forget that Ctrl-C ended the program, and its status.
        importlib.import_module("jinja2")
    named: Any = Watched if options.loader == "torch" else DataLoader
    for name, module in list(sys.modules.items()):
        is_taken = getattr(module, "__dict__", {}).get("DataLoader") is TorchDataLoader
        if is_taken and not name.startswith("spdl_torch."):
            vars(module)["DataLoader"] = named
    if named is DataLoader:
        vars(spdl_torch)["DataLoader"] = named  # for a program that has been edited
    end = functools.partial(end_process, options, known)

    def at_childs_end(_: Any = None) -> None:
        util.Finalize(None, end, exitpriority=0)
        before_exit(end)  # Python 3.13 ends the threads of a recording before that

    atexit.register(end)
    # A child of multiprocessing may end without atexit. A forked one calls this when it begins.
    util.register_after_fork(options, at_childs_end)
    if current_process().name != "MainProcess":  # but a spawned one, which has just begun
        at_childs_end()
    in_forked_child(known.clear)  # a fork reports on its own loaders, and records none
    in_forked_child(while_it_runs.pop_all)


class Site(NamedTuple):
    """A place that makes loaders. Of those made there, it tells datasets of other lengths apart."""

    where: str
    file: str  # which names torch's loader: this place's, or that of a class derived from it
    line: int  # in that file; 0 = not known
    library: str  # the library that the file is of; "" = none, it is the program's
    loads: str  # the dataset's class and length


class Made:
    """The loaders made at a site."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.how = ""  # the options of the last loader
        self.report: Any = None  # on all epochs
        self.num_batches = 0
        # Seconds: the first wait; those in iter() and next(), and between, in all epochs.
        self.first = self.waited = self.stepped = 0.0
        self.last: float | None = None
        self.due: Any = lambda: None
        """Keeps the report on the last epoch, if nobody has yet."""

    def keep(self, loader: Any) -> None:
        """Keep the report on its last epoch, with that on the epochs before."""
        if known.get(self.site) is self:  # else in a fork
            with suppress(RuntimeError):  # nothing was loaded
                self.report = OurDataLoader._report(loader, self.report)

    @property
    def time(self) -> tuple[float, float]:
        """The seconds in loops, and the share of them that waited for data."""
        if self.report is not None:
            return self.report.stats.elapsed, self.report.stats.consumer_wait_ratio
        seconds = self.waited + self.stepped
        return seconds, self.waited / max(1e-9, seconds)


known: dict[Site, Made] = {}
"""In the order in which they began to load."""
_loaders: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""By their ids: trainers make them anew."""


def _timed(kind: Any) -> Any:
    """Return the class of iterators, timed. Where the loops have run long enough, they raise
    SystemExit, which ``except Exception`` lets pass."""
    ask, most = kind.__next__, _options.compare

    def __next__(self: Any) -> Any:
        made, began = self._made, perf_counter()
        if made.last is not None:
            made.stepped += began - made.last
        if most and sum(each.waited + each.stepped for each in known.values()) >= most:
            sys.exit()
        made.last = None  # an epoch that ends, by whatever, has no step after it
        batch = ask(self)
        made.last = perf_counter()
        made.waited += made.last - began
        made.first = made.first or made.waited
        made.num_batches += 1
        return batch

    return type(kind.__name__, (kind,), {"__next__": __next__})


def _site_of(loader: Any, dataset: Any = None, *_: Any, **options: Any) -> Site:
    """Return where a loader is being made."""
    stack = (frame for frame, _ in walk_stack(sys._getframe(1)))
    frames = [frame for frame in stack if not _makes(frame, loader)]
    file, line = frames[0].f_code.co_filename, frames[0].f_lineno
    where = f"{os.path.relpath(file)}:{line}"
    if _library_of(file):
        # Lightning and Accelerate make the program's anew, from one that they have at hand.
        others = [it for it in _loaders.values() if vars(it).get("dataset", _loaders) is dataset]
        if others:
            at_hand = {id(each) for frame in frames for each in frame.f_locals.values()}
            site: Site = max(others, key=lambda it: id(it) in at_hand)._site_of_run
            return site
        own = next((it for it in frames if not _library_of(it.f_code.co_filename)), frames[-1])
        where += f", called at {os.path.relpath(own.f_code.co_filename)}:{own.f_lineno}"
    for each in type(loader).__mro__:
        if {DataLoader, Watched} & set(each.__mro__[1:]):  # the last one derives from torch's
            file, line = getattr(sys.modules[each.__module__], "__file__", file), 0
    loads = type(dataset).__name__
    with suppress(Exception):  # it has no length, or not yet
        loads += f" of {len(dataset):,}"
    _loaders[id(loader)] = loader
    return Site(where, file, line, _library_of(file), loads)


def _makes(frame: Any, loader: Any) -> bool:
    """Whether it is of ours, or the call of a constructor, of a class derived from ours or around
    one, as Lightning's."""
    names = frame.f_code.co_varnames
    is_ours = frame.f_code.co_filename.startswith(_OURS)
    return is_ours or (bool(names) and frame.f_locals.get(names[0]) is loader)


def _library_of(file: str) -> str:
    return next((file[len(at) :].split(os.sep)[0] for at in _LIBRARIES if file.startswith(at)), "")


def _begin(loader: Any, make: Any) -> Any:
    """Return the iterator of an epoch that begins, timed if that is torch's or compared; keep the
    report on the one before."""
    site = vars(loader).get("_site_of_run")
    if site is None:  # a library's class may never call the constructor
        return make()
    made = known.setdefault(site, Made(site))
    made.due()
    note_ranks()
    made.how = f"batch_size={loader.batch_size}, num_workers={loader.num_workers}"
    began, made.last = perf_counter(), None
    iterator = make()
    made.waited += perf_counter() - began
    is_torchs = getattr(loader, "_kind", TorchDataLoader) is TorchDataLoader
    with suppress(AttributeError, TypeError):  # it may be of any class of the program's
        if not is_torchs:
            # The loader may go before its iterator, or with it, and has to be asked then. Its
            # workers end with it, so a double waits for that, which has everything else.
            double = object.__new__(OurDataLoader)
            vars(double).update(vars(loader), _iterator=None)
            made.due = weakref.finalize(iterator, made.keep, double)
        if _options.compare or is_torchs:
            if not hasattr(iterator, "_made"):  # else of persistent workers
                iterator.__class__ = _timed(type(iterator))
            iterator._made = made
    return iterator


class Watched(TorchDataLoader[T_co]):
    """torch's loader, whose loops are timed."""

    @functools.wraps(TorchDataLoader.__init__)  # type: ignore[misc]  # Lightning reads it
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._site_of_run = _site_of(self, *args, **kwargs)
        super().__init__(*args, **kwargs)

    def __iter__(self) -> Any:
        return _begin(self, super().__iter__)


class DataLoader(OurDataLoader[T_co]):
    """Our loader, or torch's where ours refuses what it is given."""

    _kind: Any = TorchDataLoader  # also of a library's class that never calls the constructor

    @functools.wraps(OurDataLoader.__init__)  # type: ignore[misc]  # Lightning reads it
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        site = self._site_of_run = _site_of(self, *args, **kwargs)
        try:
            super().__init__(*args, **kwargs)
            self._kind = OurDataLoader
        except Exception as refusal:
            vars(self).clear()
            TorchDataLoader.__init__(self, *args, **kwargs)  # or raises what torch raises
            # Trainers ask every loader that has these for its state; torch's has none.
            vars(self).update(_site_of_run=site, state_dict=dict, load_state_dict=dict)
            text = f"spdl-torch run: {site.where}: torch's own loader stays. {refusal}"
            print(printable_line(text), file=sys.stderr)

    def __iter__(self) -> Any:
        if _options.record and self._kind is OurDataLoader and self._site_of_run not in known:
            from ..observe.store.recording import recording

            named = {self._site_of_run.where: self}
            while_it_runs.enter_context(recording(named, _options.record))
        return _begin(self, functools.partial(self._kind.__iter__, self))

    def _get_iterator(self) -> Any:
        return self._kind._get_iterator(self)
