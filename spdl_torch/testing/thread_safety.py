"""A check that a dataset gives the same samples on threads of one process as alone."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from ..loader.differences import path_of_difference
from ..objects.generator_states import generators_kept
from ..progress_bar import ProgressBar
from ._both_ways import BothWays, private_copy
from ._members import SharedObjects
from ._process_state import ProcessState

if TYPE_CHECKING:
    from collections.abc import Callable


def assert_thread_safe(
    dataset: Any,
    *,
    num_workers: int = 4,
    batch_size: int | None = 8,
    collate_fn: Callable[[Any], Any] | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
    num_batches: int = 100,
    num_rounds: int = 3,
    timeout: float = 60,
    seed: int = 0,
) -> None:
    """Check that a dataset can be loaded on threads: with ``isolation="thread"``.

    The dataset is loaded on ``num_workers`` threads, which switch at almost every line of its
    code, and then alone, on this thread. The batches must be equal, bit by bit. A map-style
    dataset is read in a random order; of an iterable dataset, each worker's share is read alone,
    one after the other. Loading must not change the process either: its working directory, its
    environment and its settings are the trainer's, too.

    Passing means that no fault was seen. How sure that is: the threads switch between the steps of
    the dataset's code, so what they share there is found in each round; within a library's call
    they switch as they happen to, and a race there may need more rounds. If the threads change a
    tensor or an array that they share, and no sample differs, a warning says so. A library that is
    not made for threads may end the process.

    It says what it does, on standard error; on a terminal a bar shows how far it is.

    Args:
        dataset: map-style, with a length, or iterable. It is changed if loading it changes it.
        num_workers: number of threads.
        batch_size: None = without batches.
        collate_fn: as the loader's; None = torch's.
        worker_init_fn: as the loader's.
        num_batches: the most in each round, and in each worker's share when it is read alone, so
            that an iterable dataset needs no end. All are kept in memory, and the dataset twice,
            except for arrays and tensors above 64 MiB.
        num_rounds: how often the dataset is loaded on threads.
        timeout: seconds to wait for a batch, which never comes if threads wait for each other.
        seed: of the order and the random streams.
    Raises: AssertionError: which batch and sample differs, which attributes the threads share, and
            what to do; or what loading changed in the process. The switch
            interval, the process's settings and its generators are restored.
        ValueError: a number < 1, or fewer than two workers. TypeError: no such dataset.
        Whatever the dataset raises when it is loaded alone.
    """
    numbers = {"num_workers": num_workers, "num_batches": num_batches, "num_rounds": num_rounds}
    for name, number in numbers.items():
        least = 2 if name == "num_workers" else 1
        if number < least:
            raise ValueError(f"assert_thread_safe: {name} must be >= {least}, got {number!r}.")
    if not isinstance(dataset, IterableDataset) and not hasattr(dataset, "__len__"):
        raise TypeError(
            "assert_thread_safe: dataset must have __getitem__ and __len__, or be an "
            f"IterableDataset, got {type(dataset).__name__}. Pass the dataset itself."
        )
    both_ways = BothWays(
        dataset=dataset,
        num_workers=num_workers,
        batch_size=batch_size,
        collate_fn=collate_fn,
        worker_init_fn=worker_init_fn,
        num_batches=num_batches,
        timeout=timeout,
        seed=seed,
    )
    with generators_kept(), ProcessState.kept(), warnings.catch_warnings():
        # More threads than cores are wanted here.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        _compare(both_ways, num_rounds)


def _compare(both_ways: BothWays, num_rounds: int) -> None:
    """Load on threads first: what a run alone leaves in the dataset might mask their races."""
    dataset, functions = both_ways.dataset, (both_ways.collate_fn, both_ways.worker_init_fn)
    copies = private_copy(dataset, both_ways.collate_fn)
    shared, process = SharedObjects(dataset, functions), ProcessState.now()
    changes: dict[str, str] = {}
    rounds: list[tuple[list[Any], Exception | None]] = []
    bar = ProgressBar(sys.stderr, "batches")
    for number in range(num_rounds):
        bar.begin(f"on threads, round {number + 1}/{num_rounds}", both_ways.most_batches())
        rounds.append(both_ways.on_threads(bar.advance))
        shared.look()
        changes = {**process.changed(), **changes}
        process.put_back()  # each round begins alike
    bar.begin("alone")
    expected = both_ways.alone(*copies)
    bar.end()
    changed = _listed(list(changes.values()), "; ")
    for number, (got, error) in enumerate(rounds):
        difference = _difference(expected, got, error)
        if difference is not None:
            raise AssertionError(
                f"assert_thread_safe: {both_ways.num_workers} threads must give the samples that "
                f"one gives alone, but in round {number} {difference}. {_reason(shared, changed)}"
            ) from error
    if changes:
        raise AssertionError(
            "assert_thread_safe: loading on threads must leave the process as it is, but it "
            f"changed {changed}. All threads share that, the trainer's too. "
            f"Set it in the training program, {_OR_PROCESSES}."
        )
    if written := shared.written():
        warnings.warn(
            f"assert_thread_safe: no sample differed, but the threads share {_listed(written)}, "
            "which loading changed. That is safe only if each sample writes places of its own "
            "there; what a library writes may be seen too rarely to be found here.",
            stacklevel=3,
        )


def _difference(expected: list[Any], got: list[Any], error: Exception | None) -> str | None:
    """Return where the batches first differ, or how they ended; None: they are equal."""
    for number, (a, b) in enumerate(zip(expected, got, strict=False)):
        path = path_of_difference(a, b)
        if path is not None:
            return f"batch {number} differs{path}"
    if error is not None:
        text = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
        return f"batch {len(got)} raised {text[:200]}"
    if len(got) != len(expected):
        return f"there are {len(got)} batches in place of {len(expected)}"
    return None


_OR_PROCESSES = "or leave isolation out: then it is loaded in worker processes"
_MOST_NAMES = 4


def _reason(shared: SharedObjects, changes: str) -> str:
    """Return the likely reason of a difference, and what to do; ``changes``: of the process."""
    also = f"Loading also changed {changes}. " if changes else ""
    if changed := shared.changed():
        return (
            f"The threads share {_listed(changed)}, which loading changed. {also}Make or copy it "
            "for each sample, keep one for each thread (threading.local()), or make it when it is "
            f"first used, on self: each worker has its own self; {_OR_PROCESSES}."
        )
    if suspects := shared.suspects():
        return (
            f"The threads share {_listed(suspects)}. {also}Make it when it is first used, on self: "
            f"each worker has its own self; {_OR_PROCESSES}."
        )
    return (
        f"{also}Nothing that the dataset holds was seen to change. Look for what all threads of a "
        "process share (globals, attributes of classes, os.getpid(), state in a library), and for "
        f"generators without a seed, which assert_reproducible finds; {_OR_PROCESSES}."
    )


def _listed(names: list[str], separator: str = ", ") -> str:
    more = [f"{len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else []
    return separator.join([*names[:_MOST_NAMES], *more])
